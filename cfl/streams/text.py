"""The built-in benchmarks of texts, registered when this module is imported."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from cfl.core.plugins import benchmarks
from cfl.streams import corpora, topics
from cfl.streams.benchmark import Benchmark, check_count
from cfl.streams.corpora import Corpus
from cfl.streams.datasets import Arrays
from cfl.streams.scenario import with_scenario
from cfl.streams.store import Pool, Stream
from cfl.streams.tasks import joined, split, whole
from cfl.streams.tokens import Encoder, TextOptions, encoder

_FEDPROJ = "FedProj (2025), Table 2"
_DOMAINS = ("rotten-tomatoes", "imdb", "sst2", "sentiment140")  # labels: negative, positive


def _encoded(corpus: Corpus, encode: Encoder) -> tuple[Arrays, Pool]:
    """The samples of a data set, and their pool: train rows before test rows."""
    x = [encode(texts.first, texts.second) for texts in corpus]
    y = [torch.tensor(texts.labels, dtype=torch.int64) for texts in corpus]
    return Arrays(x[0], y[0], x[1], y[1]), Pool(torch.cat(x), vocabulary=encode.vocabulary)


def _whole(name: str, data: str, summary: str, source: str = _FEDPROJ) -> None:
    """Register a data set as a benchmark of one task."""

    def build(
        tasks: int | None, seed: int, data_root: Path | None, download: bool, class_order: str, text: TextOptions
    ) -> Stream:
        check_count(name, tasks, 1)
        corpus = corpora.load(data, data_root)
        encode = encoder(text, [corpus.train])
        stream = whole(data, *_encoded(corpus, encode), classes=corpora.classes(data))
        return replace(stream, name=name, encoder=encode)

    benchmarks.register(name)(Benchmark(build, summary, source, text=True))


def _topics(
    tasks: int | None, seed: int, data_root: Path | None, download: bool, class_order: str, text: TextOptions
) -> Stream:
    return _split("split-topics", topics.corpus(), len(topics.classes()) // 2, tasks, seed, class_order, text)


def _yelp(
    tasks: int | None, seed: int, data_root: Path | None, download: bool, class_order: str, text: TextOptions
) -> Stream:
    stream = _split("split-yelp", corpora.load("yelp", data_root), 5, tasks, seed, class_order, text)
    return with_scenario(stream, "class")  # with a head a task, a task of one class would leave nothing to predict


def _split(
    name: str, corpus: Corpus, groups: int, tasks: int | None, seed: int, class_order: str, text: TextOptions
) -> Stream:
    """The classes of a data set in equal groups, a task each."""
    check_count(name, tasks, groups)
    encode = encoder(text, [corpus.train])
    arrays, pool = _encoded(corpus, encode)
    stream = split(name, arrays, groups, seed=seed, class_order=class_order, pool=pool, keep=tasks)
    return replace(stream, encoder=encode)


def _domains(
    tasks: int | tuple[str, ...] | None,
    seed: int,
    data_root: Path | None,
    download: bool,
    class_order: str,
    text: TextOptions,
) -> Stream:
    if isinstance(tasks, int):
        check_count("text-domains", tasks, len(_DOMAINS))
    names = tasks if isinstance(tasks, tuple) else _DOMAINS[: 2 if tasks is None else tasks]
    found: Mapping[str, Corpus] = {name: corpora.load(name, data_root) for name in names}
    encode = encoder(text, [corpus.train for corpus in found.values()])
    sets = {name: _encoded(corpus, encode) for name, corpus in found.items()}
    return replace(joined("text-domains", sets, classes=2), encoder=encode, multi_head=False)


_whole(
    "fedproj-reviews",
    "rotten-tomatoes",
    "sentences of Rotten Tomatoes, two classes; public: reviews of IMDB",
    f"none; the setting of {_FEDPROJ}",
)
_whole("fedproj-mnli", "mnli", "MNLI, three classes of pairs of sentences; public: SNLI")
_whole("fedproj-sst2", "sst2", "SST-2, two classes; public: Sentiment140")
_whole("fedproj-marc", "marc", "English product reviews of MARC, five classes; public: reviews of Yelp")
for _name, _build, _summary, _source, _names in (
    ("split-topics", _topics, "made sentences on ten topics, two a task, a head each", "none; for tests and demos", ()),
    ("split-yelp", _yelp, "reviews of Yelp, a class a task, one head that grows", "none; Zhang et al., 2015", ()),
    ("text-domains", _domains, "sentiment in several kinds of texts, one head", "none", _DOMAINS),
):
    benchmarks.register(_name)(Benchmark(_build, _summary, _source, names=_names, text=True))
