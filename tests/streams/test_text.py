"""Benchmarks of texts: their tasks, public texts and presets."""

import json

import pytest
import torch

import cfl
from cfl import streams
from cfl.assembly import network
from cfl.assembly.resolve import resolve
from cfl.core import ConfigError
from cfl.core.plugins import benchmarks
from cfl.runtime.runner import stream_of
from cfl.streams import TextOptions, corpora, topics, with_scenario
from tests.streams.test_corpora import pairs_as_json, reviews, write

SHORT = TextOptions(vocabulary=600, max_length=24)
WORDS = (
    "bad awful poor weak",
    "fair plain usual common",
    "good fine great superb",
    "slow dull late cold",
    "fast new rare warm",
)


def stars(folder, each=6):
    """Texts of five classes as files of MARC and Yelp: words of their class alone."""
    rows = [(label + 1, f"{words} {n}") for n in range(each) for label, words in enumerate(WORDS)]
    for part in ("train", "test"):
        write(folder / f"yelp_review_full_csv/{part}.csv", "".join(f'"{label}","{text}"\n' for label, text in rows))
        made = "".join(json.dumps({"stars": str(s), "review_body": t, "language": "en"}) + "\n" for s, t in rows)
        write(folder / f"marc/dataset_en_{part}.json", made)


def sentiments(folder):
    """Twelve sentences as files of SST-2, and as tweets."""
    rows = [(n % 2, f"{WORDS[2 * (n % 2)]} number {n}") for n in range(12)]
    for part in ("train", "dev"):
        write(folder / f"SST-2/{part}.tsv", "sentence\tlabel\n" + "".join(f"{text}\t{label}\n" for label, text in rows))
    for file in ("training.1600000.processed.noemoticon", "testdata.manual.2009.06.14"):
        tweets = "".join(f'"{4 * label}","1","d","q","u","tweet {text}"\n' for label, text in rows)
        write(folder / f"sentiment140/{file}.csv", tweets)


def decoded(stream, samples):
    return [stream.encoder.text(sample) for sample in samples.pool.images[samples.index]]


# --- made sentences --------------------------------------------------------------------------------------------------


def test_topics_are_different_sentences_with_words_of_their_own():
    train, test = topics.corpus()
    assert [len(part.labels) for part in (train, test)] == [1600, 400]
    assert len({*train.first, *test.first}) == 2000  # none occurs twice
    assert topics.corpus() == (train, test)
    of_topic = [
        {word for text, own in zip(train.first, train.labels) if own == c for word in text.split()} for c in range(10)
    ]
    for label, words in enumerate(of_topic):
        own = words - set.union(*(other for number, other in enumerate(of_topic) if number != label))
        texts = [text for text, c in zip(test.first, test.labels) if c == label]
        assert all(own & {*text.split()} for text in texts), topics.classes()[label]  # so a bag of words suffices


def test_topics_are_split_by_class_with_the_texts_of_the_corpus():
    stream = streams.build("split-topics", seed=3, text=SHORT)
    assert (len(stream), stream.scenario, stream.input_shape) == (5, "task", (2, 24))
    assert stream.vocabulary <= 600 and [task.classes for task in stream.tasks] == [2] * 5
    train, _ = topics.corpus()
    label_of = dict(zip(train.first, train.labels))
    found = []
    for task in stream.tasks:
        labels = [label_of[text] for text in decoded(stream, task.train)]
        order = [labels[task.train.targets.tolist().index(own)] for own in (0, 1)]
        assert labels == [order[own] for own in task.train.targets.tolist()]
        found += order
    assert sorted(found) == list(range(10)) and found != list(range(10))
    with pytest.raises(ConfigError, match=r"tasks must be in \[1, 5\] for 'split-topics', not 6"):
        streams.build("split-topics", tasks=6)


def test_topics_run_class_incrementally():
    stream = with_scenario(streams.build("split-topics", tasks=2, text=SHORT), "class")
    assert (stream.scenario, stream.heads, stream.encoder is not None) == ("class", (2, 2), True)


# --- local files -----------------------------------------------------------------------------------------------------


def test_a_class_of_yelp_is_a_task_of_a_growing_head(tmp_path):
    stars(tmp_path)
    stream = streams.build("split-yelp", data_root=tmp_path, class_order="natural", text=SHORT)
    assert (len(stream), stream.scenario, stream.heads) == (5, "class", (1,) * 5)
    assert stream.tasks[3].train.targets.tolist() == [3] * 6
    assert all(text.startswith(WORDS[3]) for text in decoded(stream, stream.tasks[3].train))


def test_domains_share_a_head_and_a_tokenizer(tmp_path, monkeypatch):
    sentiments(tmp_path)
    reviews(tmp_path, monkeypatch)
    stream = streams.build("text-domains", data_root=tmp_path, tasks=("sst2", "sentiment140"), text=SHORT)
    assert ([task.name for task in stream.tasks], stream.scenario) == (["sst2", "sentiment140"], "domain")
    assert decoded(stream, stream.tasks[1].test)[1] == "tweet " + decoded(stream, stream.tasks[0].test)[1]
    assert "good fine great superb number 1" in decoded(stream, stream.tasks[0].train)
    default = streams.build("text-domains", data_root=tmp_path, text=SHORT)
    assert [(task.name, len(task.train)) for task in default.tasks] == [("rotten-tomatoes", 34), ("imdb", 10)]
    with pytest.raises(ConfigError, match="unknown task of 'text-domains' 'sst1'; did you mean 'sst2'"):
        streams.build("text-domains", tasks=("sst1",))


def test_private_and_public_texts_of_fedproj(tmp_path, monkeypatch):
    sentiments(tmp_path)
    stars(tmp_path)
    reviews(tmp_path, monkeypatch)
    for part in ("multinli_1.0/multinli_1.0_train", "multinli_1.0/multinli_1.0_dev_matched"):
        write(tmp_path / f"{part}.jsonl", pairs_as_json())
    for part in ("train", "test"):
        write(tmp_path / f"snli_1.0/snli_1.0_{part}.jsonl", pairs_as_json().replace("rains", "rains."))
    sizes = {"mnli": (3, 3, 3, 6), "sst2": (2, 12, 12, 24), "marc": (5, 30, 30, 60), "reviews": (2, 34, 1066, 5010)}
    for name, (classes, train, test, public) in sizes.items():
        config = resolve(f"fedproj-{name}", method="fedproj", overrides=["public.samples=null", "text.max_length=24"])
        stream = stream_of(config, tmp_path, False, public=True)
        (task,) = stream.tasks
        assert (task.classes, len(task.train), len(task.test), len(stream.public)) == (classes, train, test, public)
        assert not stream.public.targets.any() and stream.public.pool.vocabulary == stream.vocabulary
        assert stream.input_shape == (2, 24)
        first, _ = stream.public.gather(torch.tensor([0]))
        own = corpora.load(config.public.name, tmp_path).train.taken([0])
        assert torch.equal(
            first[0], stream.encoder(own.first, own.second)[0, :, : first.shape[2]].long()
        )  # by the clients' tokenizer


def test_public_texts_are_drawn_by_the_seed_and_no_private_ones(tmp_path, monkeypatch):
    reviews(tmp_path, monkeypatch)
    stream = streams.build("fedproj-reviews", data_root=tmp_path, text=SHORT)

    def rows(seed):
        drawn = streams.with_public(stream, "imdb", samples=50, seed=seed, data_root=tmp_path)
        return [int(text.split()[-1]) for text in decoded(drawn, drawn.public)]

    assert len({*rows(0)}) == 50 and rows(0) == rows(0) != rows(1)
    with pytest.raises(ConfigError, match="'rotten-tomatoes' is the data set of the clients"):
        streams.with_public(stream, "rotten-tomatoes", data_root=tmp_path)
    with pytest.raises(ConfigError, match="unknown data set of texts 'cifar100'"):
        streams.with_public(stream, "cifar100", data_root=tmp_path)


# --- presets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "public"), [("reviews", "imdb"), ("mnli", "snli"), ("sst2", "sentiment140"), ("marc", "yelp")]
)
def test_presets_have_the_settings_of_fedproj(name, public):
    """Section 5.1. Its learning rate, 3e-5, is for pretrained weights."""
    config = resolve(f"fedproj-{name}", method="fedproj")
    assert (config.partition.name, config.partition.clients, config.partition.alpha) == ("lda", 15, 0.3)
    assert (config.cohort, config.rounds, config.local.epochs, config.local.optimizer) == (4, 15, 1, "adam")
    assert (config.public.name, config.model.name, config.model.weights) == (public, "bert_tiny", None)
    for method in ("fedproj", "feddf", "fedet"):
        own = resolve(f"fedproj-{name}", method=method).regularizer[method]
        assert (own["server_epochs"], own["server_batch"], own["server_lr"]) == (1, 128, 3e-5)
        assert own["temperature"] == (1 if method == "fedet" else 3)  # Fed-ET has none (Cho et al., 2022)
    # pairs have the types of their tokens by the separator of the trained tokenizer, [SEP]
    assert config.model.options["separator"] == (3 if name == "mnli" else None)


# --- networks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "why"), [("target", "token ids have none of"), ("fedcil", "texts are token ids")])
def test_methods_that_make_images_are_refused(method, why):
    config = cfl.resolve("split-topics", method=method, overrides=["tasks=2", "rounds=1"])
    with pytest.raises(ConfigError, match=f"{method} cannot run on texts: .*{why}"):
        cfl.run(config)


def test_a_network_of_images_is_refused():
    config = resolve("split-topics", overrides=["model.name=mlp"])
    with pytest.raises(ConfigError, match="model 'mlp' takes no texts.*set model.name to a network of texts"):
        network.build(config, (2, 16), 2, 300)


def test_a_benchmark_of_texts_takes_their_options():
    text = {name for name in benchmarks.names() if benchmarks.get(name).text}
    assert {"fedproj-reviews", "split-topics"} <= text and not text & {"mnist", "five-datasets"}
    with pytest.raises(ConfigError, match=r"must take \(tasks, seed, data_root, download, class_order, text\)"):
        cfl.streams.Benchmark(lambda tasks, seed, data_root, download, class_order: None, "s", "s", text=True)
