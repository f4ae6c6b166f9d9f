"""Every option of a run with its default and valid range."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from cfl.core.errors import ConfigError
from cfl.core.plugins import DEFAULT_METHOD

Positive = Annotated[int, Field(ge=1, le=2**31)]
# YAML knows lists only; the strict models want tuples.
Tuple = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)


class Section(BaseModel):
    """A group of options: immutable, no key but the named ones, no silent conversion (`true` is not 1)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class PartitionConfig(Section):
    """How a task's training samples are dealt to the clients."""

    name: Literal["iid", "shards", "dirichlet", "sharding", "lda", "classes"] = Field(
        "iid", description="how samples are dealt to clients"
    )
    clients: Positive = Field(20, description="number of clients in the population")
    alpha: float = Field(0.5, gt=0, description="concentration of `dirichlet` and `lda`; smaller is more uneven")
    task_share: float = Field(1.0, gt=0, le=1, description="share of the clients that hold a given task")
    shards: Positive = Field(2, description="label shards a client gets with `shards` and `sharding`")
    min_samples: Positive = Field(10, description="the fewest samples that `lda` leaves a client with")


class LocalConfig(Section):
    """Local training of a client."""

    epochs: Positive = Field(1, description="passes over the client's data a round")
    batch_size: Positive = Field(16, description="samples a step")
    optimizer: Literal["sgd", "adam"] = Field("sgd", description="local optimiser")
    lr: float = Field(0.01, gt=0, description="learning rate")
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum of SGD")
    weight_decay: float = Field(0.0, ge=0, description="weight decay (L2 term of the gradient)")
    lr_decay: float = Field(1.0, gt=0, le=1, description="factor on the learning rate after each round")
    lr_restart: bool = Field(True, description="whether the schedule restarts at each task")
    augment: Annotated[tuple[Literal["crop", "flip", "cutout"], ...], Tuple] = Field(
        (), description="random changes of training images: crop, flip, cutout"
    )


class PublicConfig(Section):
    """Inputs without labels that server and clients may see, for the methods that distil."""

    name: str | None = Field(None, description="data set; `stream` for the benchmark's own public part")
    samples: Positive | None = Field(None, description="how many, drawn by the seed; null for all")


class ModelConfig(Section):
    """The network; `model.<x>` for any other x is an option of the model's builder."""

    name: str = Field("mlp", description="name of the model; see `cfl-run list models`")
    norm_stats: Literal["per_task", "batch", "running"] = Field(
        "per_task", description="statistics that normalisation layers use at test time"
    )
    options: dict[str, Any] = Field(default_factory=dict, description="arguments of the model's builder")


class ServerConfig(Section):
    """The server's step."""

    lr: float = Field(1.0, gt=0, description="server learning rate; 1 is plain averaging")


class AggConfig(Section):
    """How uploads are averaged."""

    weights: Literal["samples", "uniform"] = Field("samples", description="weight of a client in the mean")


class SecureConfig(Section):
    """The sum of uploads as integers, with `secagg=full` (masked) and `secagg=sum` (the same without the masks)."""

    bits: Literal[16, 32, 64] = Field(64, description="uploads are summed as integers modulo 2^bits")
    fraction_bits: int = Field(24, ge=0, le=52, description="how many of the bits stand behind the point")
    quorum: float = Field(0.5, gt=0, le=1, description="share of a cohort that must stay for its sum to be opened")
    neighbours: Positive | None = Field(
        None,
        description="clients with which each one shares masks; null for the fewest that are safe, about log(cohort)",
    )


class PrivacyConfig(Section):
    """Differential privacy of what clients send: (epsilon, delta) over all rounds, phases and tasks."""

    level: Literal["none", "client", "example"] = Field(
        "none", description="what is protected: a client's whole data, or one sample; client where a budget is given"
    )
    clip: float = Field(1.0, gt=0, description="largest L2 norm of a client's upload, or of a sample's gradient")
    noise_multiplier: float | None = Field(None, gt=0, description="standard deviation of the noise over dp.clip")
    target_epsilon: float | None = Field(None, gt=0, description="epsilon of the whole run, to solve for the noise")
    delta: float = Field(1e-5, gt=0, lt=1, description="delta at which epsilon is stated")
    protect: Literal["all", "work"] = Field(
        "all", description="protected uploads: all, or only those beside the updates, such as sketches"
    )
    amplify: bool = Field(True, description="whether the adversary does not know which clients a round has drawn")
    accountant: Literal["prv", "rdp"] = Field("prv", description="accountant: prv is tight, rdp an upper bound")

    @model_validator(mode="before")
    @classmethod
    def _of_a_client(cls, data: Any) -> Any:
        """A budget without a level is one of client-level privacy."""
        budget = isinstance(data, Mapping) and (data.get("target_epsilon") or data.get("noise_multiplier"))
        return {"level": "client", **data} if budget else data


class RunConfig(Section):
    """All that decides the result of a run; `dump` makes plain data of it, `resolve` and `load` make one."""

    benchmark: str = Field(description="name of the benchmark; see `cfl-run list benchmarks`")
    scale: Literal["paper", "small", "smoke"] = Field(
        "paper", description="length of the run: the paper's, ten minutes to an hour on two cores, or seconds"
    )
    method: str = Field(DEFAULT_METHOD, description="strategy of the run; see `cfl-run list methods`")
    regularizers: Annotated[tuple[str, ...], Tuple] = Field((), description="local regularizers, in order")
    seed: int = Field(0, ge=0, le=2**32 - 1, description="seed of every draw")  # the most that numpy takes
    tasks: Annotated[Positive | tuple[str, ...] | None, Tuple] = Field(
        None, description="number of tasks, or their names where they have some; null for all of the benchmark"
    )
    rounds: Annotated[Positive | tuple[Positive, ...] | dict[str, Positive], Tuple] = Field(
        20, description="rounds a task: one number, a list, or by the names of the tasks"
    )
    cohort: Positive = Field(10, description="clients a round; all owners of the task where there are fewer")
    sampling: Literal["fixed", "poisson"] = Field(
        "fixed", description="cohorts of the same size, or each client drawn independently with the same mean"
    )
    drop_rate: float = Field(0.0, ge=0, lt=1, description="probability that a client of a cohort drops out of a round")
    class_order: Literal["random", "natural"] = Field("random", description="order in which classes join tasks")
    engine: Literal["loop", "vmapped", "pool", "pool+vmapped", "auto"] = Field(
        "loop",
        description="clients one by one, in blocks at once, in processes, both, or what is fastest in the first steps",
    )
    block: Positive | None = Field(
        None, description="clients trained at once, or handed to a process; null: measured, or a 16th of the cohort"
    )
    workers: int | None = Field(None, ge=1, le=1024, description="processes of a pool; null: one for each core")
    device: str = Field("cpu", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:N")
    partition: PartitionConfig = PartitionConfig()
    local: LocalConfig = LocalConfig()
    model: ModelConfig = ModelConfig()
    server: ServerConfig = ServerConfig()
    agg: AggConfig = AggConfig()
    public: PublicConfig = PublicConfig()
    strategy: dict[str, Any] = Field(default_factory=dict, description="hyper-parameters of the method")
    regularizer: dict[str, dict[str, Any]] = Field(default_factory=dict, description="those of each local regularizer")
    eval_every: int = Field(
        0, ge=0, le=2**31, description="rounds between evaluations of the current task; 0: at its end only"
    )
    eval_local: int = Field(
        0, ge=0, le=2**31, description="rounds between evaluations of the cohort's local models; 0: never"
    )
    eval_batch_size: Positive = Field(1024, description="samples a batch in evaluations")
    checkpoint_every: Positive = Field(1, description="rounds between checkpoints; the end of a task always has one")
    threads: int = Field(1, ge=1, le=256, description="threads inside an operation; `auto` may take one a core")
    on_bad_update: Literal["raise", "exclude"] = Field("raise", description="what NaN in a client's update does")
    secagg: Literal["none", "sum", "full"] = Field(
        "none", description="secure aggregation: none, the same sums and bytes without masks, or in full"
    )
    secure: SecureConfig = SecureConfig()
    dp: PrivacyConfig = PrivacyConfig()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        tasks = len(self.tasks) if isinstance(self.tasks, tuple) else self.tasks
        if isinstance(self.rounds, tuple) and tasks not in (None, len(self.rounds)):
            raise ConfigError(f"rounds lists {len(self.rounds)} numbers for {tasks} tasks; give one a task")
        if self.public.samples and self.public.name == "stream":
            raise ConfigError("public.samples draws from a data set, not from the stream's own; set it to null")
        if len(set(self.regularizers)) < len(self.regularizers):
            raise ConfigError(f"local regularizers must differ from each other, not {', '.join(self.regularizers)}")
        for name in self.regularizer:
            if name not in self.regularizers:
                raise ConfigError(f"regularizer.{name} is set, but '{name}' is not used; add --local {name}")
        return self

    @property
    def label(self) -> str:
        """The name under which `--method` takes this combination: "fot+fedsol", or "fedsol" for it alone."""
        alone = self.method == DEFAULT_METHOD and self.regularizers
        return "+".join(self.regularizers if alone else (self.method, *self.regularizers))
