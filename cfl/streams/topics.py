"""Made sentences on ten topics: a small data set of texts that needs no file.

A sentence fills a template with words of its topic and with words that all topics share, so its class follows from a
few of its words, whatever the template. Every sentence occurs once.
"""

from collections.abc import Sequence

from cfl.core import rng
from cfl.streams.corpora import Corpus
from cfl.streams.tokens import Texts

TRAIN, TEST = 160, 40  # sentences a topic

# topic -> who, what they do, to what
_TOPICS = {
    "cooking": ("cook baker chef waiter", "stirs bakes tastes serves", "soup bread sauce cake"),
    "sailing": ("sailor captain pilot rower", "steers anchors rigs boards", "boat yacht ferry raft"),
    "music": ("singer drummer pianist composer", "plays sings tunes records", "song violin piano chorus"),
    "farming": ("farmer shepherd ploughman gardener", "plants harvests waters feeds", "wheat cow orchard sheep"),
    "astronomy": ("astronomer stargazer physicist observer", "tracks photographs measures predicts",
                  "comet planet galaxy eclipse"),
    "football": ("striker goalkeeper referee coach", "kicks passes blocks scores", "ball goal penalty match"),
    "medicine": ("doctor nurse surgeon dentist", "heals examines bandages vaccinates", "patient wound fever tooth"),
    "law": ("judge lawyer sheriff notary", "accuses acquits defends sentences", "thief trial witness contract"),
    "building": ("mason carpenter plumber architect", "builds plasters drills designs", "wall roof bridge tower"),
    "finance": ("banker broker cashier accountant", "lends invests counts audits", "loan share budget coin"),
}  # fmt: skip
_TEMPLATES = (
    "the {who} {does} the {what} {when}",
    "{when} the {how} {who} {does} a {what}",
    "nobody knows why the {who} {does} the {how} {what}",
    "we saw how a {who} {does} the {what} with a friend {when}",
)
_HOW = ("old", "young", "quiet", "famous", "clever", "tired")
_WHEN = ("today", "at night", "in the morning", "every week", "after the rain", "once again")


def classes() -> list[str]:
    """Names of the topics, in the order of their class numbers."""
    return list(_TOPICS)


def corpus() -> Corpus:
    """The sentences, the same in every run: 160 train and 40 test sentences of each topic, with labels from 0."""
    sentences = [_sentences(topic, TRAIN + TEST) for topic in _TOPICS]
    train, test = [own[:TRAIN] for own in sentences], [own[TRAIN:] for own in sentences]
    return Corpus(_joined(train), _joined(test))


def _joined(topics: Sequence[Sequence[str]]) -> Texts:
    """Sentences of all topics, with the number of the topic as the label."""
    labelled = [(sentence, label) for label, own in enumerate(topics) for sentence in own]
    return Texts([sentence for sentence, _ in labelled], None, [label for _, label in labelled])


def _sentences(topic: str, count: int) -> list[str]:
    """That many sentences on a topic, all different."""
    draws = rng.numpy_generator(rng.key(0, "topics", topic))
    who, does, what = (words.split() for words in _TOPICS[topic])
    found: dict[str, None] = {}
    words: dict[str, Sequence[str]] = {"who": who, "does": does, "what": what, "how": _HOW, "when": _WHEN}
    while len(found) < count:
        drawn = {name: choices[int(draws.integers(len(choices)))] for name, choices in words.items()}
        found[_TEMPLATES[int(draws.integers(len(_TEMPLATES)))].format(**drawn)] = None
    return list(found)
