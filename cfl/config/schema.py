"""All options of a run, with their defaults and valid ranges."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ModelWrapValidatorHandler, ValidationError, model_validator

from cfl.config.attack import AttackConfig
from cfl.config.faults import one_line
from cfl.config.section import Positive, Section, Tuple
from cfl.core import ConfigError
from cfl.core.plugins import DEFAULT_METHOD


class PartitionConfig(Section):
    """Partition of a task's training samples among the clients."""

    name: Literal["iid", "shards", "dirichlet", "sharding", "lda", "classes", "stream"] = Field(
        "iid", description="how samples are distributed among the clients; `stream`: as the stream says"
    )
    clients: Positive = Field(20, description="number of clients in the population")
    alpha: float = Field(0.5, gt=0, description="concentration of `dirichlet` and `lda`; smaller is more uneven")
    task_share: float = Field(1.0, gt=0, le=1, description="share of the clients that hold data of a task")
    shards: Positive = Field(2, description="label shards per client with `shards` and `sharding`")
    min_samples: Positive = Field(10, description="smallest number of samples of a client with `lda`")


class LocalConfig(Section):
    """Local training of a client."""

    epochs: Positive = Field(1, description="passes over the client's data per round")
    batch_size: Positive = Field(16, description="samples per step")
    optimizer: Literal["sgd", "adam"] = Field("sgd", description="local optimiser")
    lr: float = Field(0.01, gt=0, description="learning rate")
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum of SGD")
    weight_decay: float = Field(0.0, ge=0, description="weight decay (L2 term of the gradient)")
    lr_decay: float = Field(1.0, gt=0, le=1, description="factor on the learning rate after each round")
    lr_restart: bool = Field(True, description="whether the decay of the learning rate restarts at each task")
    augment: Annotated[tuple[Literal["crop", "flip", "cutout"], ...], Tuple] = Field(
        (), description="random augmentations of training images: crop, flip, cutout"
    )


class PublicConfig(Section):
    """Unlabelled inputs that the server and all clients may read, for methods that distil."""

    name: str | None = Field(None, description="data set; `stream` for the benchmark's own public part")
    samples: Positive | None = Field(None, description="number of samples, drawn by the seed; null for all")


class TextConfig(Section):
    """Samples of a benchmark of texts."""

    tokenizer: str | None = Field(
        None, description="file tokenizer.json; null: a WordPiece tokenizer, trained on the training texts"
    )
    vocabulary: int = Field(
        8192,
        ge=6,
        le=2**20,
        description="largest number of token ids of a trained tokenizer; each character gets one, even beyond it",
    )
    max_length: int = Field(64, ge=8, le=2**13, description="tokens of a sample; longer texts are cut off")


class ModelConfig(Section):
    """Network; `model.<x>` for any other x is an option of the model's builder."""

    name: str = Field("mlp", description="name of the model; see `cfl-run list models`")
    weights: str | None = Field(
        None, description="folder of pretrained weights, which sets name and sizes of the network; null: random weights"
    )
    norm_stats: Literal["per_task", "batch", "running"] = Field(
        "per_task", description="statistics that normalisation layers use at test time"
    )
    adapter: Literal["none", "lora"] = Field(
        "none", description="what trains: all parameters, or with lora only the head and adapters of low rank"
    )
    adapter_rank: Positive = Field(8, description="rank r of an adapter")
    adapter_alpha: float | None = Field(
        None, gt=0, description="an adapter's output counts alpha / r times; null: once"
    )
    adapter_targets: Annotated[tuple[str, ...], Tuple] = Field(
        (), description="layers with an adapter, by name or part of a name; empty: all but the head"
    )
    options: dict[str, Any] = Field(default_factory=dict, description="arguments of the model's builder")


class ServerConfig(Section):
    """Server step."""

    lr: float = Field(1.0, gt=0, description="server learning rate; 1 is plain averaging")


class AggConfig(Section):
    """Average of the uploads."""

    weights: Literal["samples", "uniform"] = Field("samples", description="weight of a client in the mean")


class SecureConfig(Section):
    """Integer sums of uploads with `secagg=full` (masked) and `secagg=sum` (the same sums without masks)."""

    bits: Literal[16, 32, 64] = Field(64, description="uploads are summed as integers modulo 2^bits")
    fraction_bits: int = Field(24, ge=0, le=52, description="number of bits behind the binary point")
    quorum: float = Field(0.5, gt=0, le=1, description="share of a cohort that must stay to open its sum")
    neighbours: Positive | None = Field(
        None,
        description="clients with which a client shares masks; null: the fewest that are safe, about log(cohort)",
    )
    consistency: bool = Field(
        False, description="whether clients sign keys and lists, against a server that breaks the protocol"
    )


class PrivacyConfig(Section):
    """Differential privacy of uploads: (epsilon, delta) over all rounds, phases and tasks."""

    level: Literal["none", "client", "example"] = Field(
        "none", description="protected unit: all data of a client, or one sample; client if only a budget is given"
    )
    clip: float = Field(1.0, gt=0, description="largest L2 norm of a client's upload, or of a sample's gradient")
    noise_multiplier: float | None = Field(None, gt=0, description="standard deviation of the noise over dp.clip")
    target_epsilon: float | None = Field(None, gt=0, description="epsilon of the whole run; sets the noise")
    delta: float = Field(1e-5, gt=0, lt=1, description="delta at which epsilon is reported")
    protect: Literal["all", "work"] = Field(
        "all", description="protected uploads: all, or only those of `work`, such as sketches"
    )
    amplify: bool = Field(True, description="whether cohorts are secret, so that sampling amplifies privacy")
    accountant: Literal["prv", "rdp"] = Field("prv", description="accountant: prv is tight, rdp a looser bound")
    noise_seed: Literal["run", "system"] = Field(
        "run",
        description="source of noise and Poisson batches: the run's seed, or the system's entropy, which never repeats",
    )

    @model_validator(mode="before")
    @classmethod
    def _of_a_client(cls, data: Any) -> Any:
        """Set the level to client for a budget without a level."""
        budget = isinstance(data, Mapping) and (data.get("target_epsilon") or data.get("noise_multiplier"))
        return {"level": "client", **data} if budget else data


class FlowerConfig(Section):
    """Nodes that compute the clients with `engine=flower`."""

    address: str | None = Field(
        None, description="Ray cluster of a simulation; null: this machine; in-process: no Ray, one after another"
    )
    deadline: float = Field(600.0, gt=0, description="seconds in which a node has to answer")
    quorum: float = Field(0.5, gt=0, le=1, description="share of a cohort that has to answer, without secagg")


class RunConfig(Section):
    """All options that decide the result of a run. `resolve` and `load` make one; `dump` converts it to plain data.

    Raises ConfigError in one line with the option, its value and the valid values.
    """

    benchmark: str = Field(description="name of the benchmark; see `cfl-run list benchmarks`")
    scale: Literal["paper", "small", "smoke"] = Field(
        "paper",
        description="length of the run: the paper's, mostly under an hour on two cores (small), or seconds (smoke)",
    )
    method: str = Field(DEFAULT_METHOD, description="strategy of the run; see `cfl-run list methods`")
    regularizers: Annotated[tuple[str, ...], Tuple] = Field((), description="local regularizers, in order")
    seed: int = Field(0, ge=0, le=2**128 - 1, description="seed of every random draw")
    tasks: Annotated[Positive | tuple[str, ...] | None, Tuple] = Field(
        None, description="number of tasks, or names of tasks that have names; null for all of the benchmark"
    )
    rounds: Annotated[Positive | tuple[Positive, ...] | dict[str, Positive], Tuple] = Field(
        20, description="rounds per task: one number, a list, or a mapping from names of tasks"
    )
    cohort: Positive = Field(10, description="clients per round; all owners of the task if these are fewer")
    sampling: Literal["fixed", "poisson", "round"] = Field(
        "fixed",
        description="cohorts of fixed size; clients drawn independently with the same mean size; or cohorts of fixed "
        "size that depend on the number of a training round within the run, not on the seed",
    )
    drop_rate: float = Field(0.0, ge=0, lt=1, description="probability that a client of a cohort drops out of a round")
    validation: float = Field(
        0.0, ge=0, lt=1, description="share of each task's training samples that no client gets, to choose options by"
    )
    class_order: Literal["random", "natural"] = Field("random", description="order of the classes over the tasks")
    scenario: Literal["task", "class", "domain"] | None = Field(
        None, description="heads: one a task, one that grows with the classes, or one for all; null: the benchmark's"
    )
    class_loss: Literal["seen", "current"] = Field(
        "seen", description="with scenario=class: classes in the loss of a new sample, all seen or those of its task"
    )
    start: str | None = Field(
        None,
        description="folder of another run, with whose model this run starts; null: with random or pretrained weights",
    )
    engine: Literal["loop", "vmapped", "pool", "pool+vmapped", "flower", "auto"] = Field(
        "loop",
        description="clients one by one, in vectorised blocks, in processes, both, in blocks on the nodes of a Flower "
        "simulation, or the fastest of the first four in the first steps",
    )
    block: Positive | None = Field(
        None, description="clients trained, or sent to a process, at once; null: measured, or a 16th of the cohort"
    )
    compile: bool | None = Field(
        None, description="compile the local steps of whole vectorised blocks; null: no, or as engine=auto measures"
    )
    workers: int | None = Field(
        None, ge=1, le=1024, description="processes of a pool or a simulation; null: one per core"
    )
    precision: Literal["float32", "bf16"] = Field(
        "float32",
        description="products in local steps and predictions: float32, or bfloat16 (bf16) with all weights in float32",
    )
    device: str = Field("cpu", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:N")
    partition: PartitionConfig = PartitionConfig()
    local: LocalConfig = LocalConfig()
    model: ModelConfig = ModelConfig()
    server: ServerConfig = ServerConfig()
    agg: AggConfig = AggConfig()
    public: PublicConfig = PublicConfig()
    text: TextConfig = TextConfig()
    strategy: dict[str, Any] = Field(default_factory=dict, description="hyper-parameters of the method")
    regularizer: dict[str, dict[str, Any]] = Field(default_factory=dict, description="options of local regularizers")
    eval_every: int = Field(
        0, ge=0, le=2**31, description="rounds between evaluations of the current task; 0: only at its end"
    )
    eval_later: bool = Field(
        False, description="evaluate tasks before they are learned, too, for FWT; with one head for all tasks"
    )
    eval_local: int = Field(
        0, ge=0, le=2**31, description="rounds between evaluations of the cohort's local models; 0: never"
    )
    eval_batch_size: Positive = Field(
        1024, description="samples per batch in evaluations; on a CPU in passes of 128 at most"
    )
    checkpoint_every: Positive = Field(1, description="rounds between checkpoints; the end of a task always writes one")
    threads: int = Field(1, ge=1, le=256, description="threads of an operation; engine=auto may choose one per core")
    on_bad_update: Literal["raise", "exclude"] = Field("raise", description="reaction to NaN in a client's update")
    secagg: Literal["none", "sum", "full"] = Field(
        "none", description="secure aggregation: none, sum (the same sums and bytes without masks), or full"
    )
    secure: SecureConfig = SecureConfig()
    dp: PrivacyConfig = PrivacyConfig()
    flower: FlowerConfig = FlowerConfig()
    attack: AttackConfig = AttackConfig()

    @model_validator(mode="wrap")
    @classmethod
    def _in_one_line(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(data)
        except ValidationError as error:
            raise one_line(error, cls.model_json_schema()) from None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        tasks = len(self.tasks) if isinstance(self.tasks, tuple) else self.tasks
        if isinstance(self.rounds, tuple) and tasks not in (None, len(self.rounds)):
            raise ConfigError(f"rounds lists {len(self.rounds)} numbers for {tasks} tasks; give one per task")
        if self.public.samples and self.public.name == "stream":
            raise ConfigError("public.samples does not apply to public.name=stream; set it to null")
        if self.partition.name == "stream" and self.partition.task_share < 1:
            raise ConfigError("partition.name=stream says who holds a task; leave partition.task_share at 1")
        if self.attack.name != "none" and self.attack.clients > self.partition.clients:
            raise ConfigError(
                f"attack.clients={self.attack.clients} is more than partition.clients={self.partition.clients}; "
                "lower it"
            )
        if self.start is not None and not self.start.strip():
            raise ConfigError("start (--from) is an empty text; name the folder of a run, or leave it out")
        if self.attack.name == "label_flip" and self.attack.strength is not None:
            raise ConfigError("attack.strength does not apply to attack.name=label_flip; set it to null")
        if len(set(self.regularizers)) < len(self.regularizers):
            raise ConfigError(f"local regularizers must differ from each other, not {', '.join(self.regularizers)}")
        for name in self.regularizer:
            if name not in self.regularizers:
                raise ConfigError(f"regularizer.{name} is set, but '{name}' is not used; add --local {name}")
        return self

    @property
    def noise_seed(self) -> int | None:
        """Seed of the draws that privacy depends on; None for the system's entropy."""
        return None if self.dp.noise_seed == "system" else self.seed

    @property
    def label(self) -> str:
        """Name of the combination for `--method`, such as "fot+fedsol"; "fedsol" for this regularizer alone."""
        alone = self.method == DEFAULT_METHOD and self.regularizers
        return "+".join(self.regularizers if alone else (self.method, *self.regularizers))

    @property
    def title(self) -> str:
        """Benchmark, combination and seed, for people."""
        return f"{self.benchmark}, {self.label}, seed {self.seed}"

    def __repr__(self) -> str:
        return f"RunConfig({self.title}, scale={self.scale}, tasks={self.tasks}, rounds={self.rounds})"

    __str__ = __repr__
