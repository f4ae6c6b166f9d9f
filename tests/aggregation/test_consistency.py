"""The consistency check: sums as without it, servers that swap keys or split the clients, forged signatures."""

import math
from itertools import pairwise

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import cfl
from cfl.aggregation.consistency import SIGNATURE, Witness, _list_text
from cfl.aggregation.mask_graph import accomplices, needed, unsafe
from cfl.aggregation.parties import LocalParties
from cfl.aggregation.secagg import SecureSum
from cfl.aggregation.secagg_client import MASK, SELF, Client
from cfl.contract import STAGES
from cfl.core import ConfigError, RoundAborted
from tests import toy

COUNT, QUORUM = 10, 0.7


def secure(dropped=None, parties=None, masked=True, consistency=True, count=COUNT):
    return SecureSum(
        range(count), population=count, bits=32, threshold=QUORUM, neighbours=None, dropped=dropped or {},
        drop_rate=0.0, key=1, masked=masked, consistency=consistency, parties=parties,
    )  # fmt: skip


def total(sum_):
    sum_.setup()
    for i in sum_.uploading:
        sum_.add(i, np.full(3, 10**i % 2**32, np.uint32))
    return sum_.close().tolist()


def expected(ids):
    return [sum(10**i for i in ids) % 2**32] * 3


@pytest.mark.parametrize("stage", STAGES)
def test_sums_are_those_of_the_clients_that_uploaded(stage):
    dropped = {2: stage, 5: stage}
    left = range(COUNT) if stage == "unmask" else [i for i in range(COUNT) if i not in dropped]
    assert total(secure(dropped)) == total(secure(dropped, masked=False)) == expected(left)


def test_too_few_signatures_end_the_round():
    class Silent(LocalParties):
        def confirm(self, uploaded):
            return dict(list(super().confirm(uploaded).items())[:6])

    with pytest.raises(RoundAborted, match="6 of 10 clients are left after stage consistency, 7 are needed"):
        total(secure(parties=Silent()))


def test_bytes_of_the_signatures():
    """64 bytes more for each key, n up and n (n - 1) down; n lists of n ids; n signatures up and n^2 down."""
    n, plain, signed = COUNT, secure(consistency=False, masked=False), secure(masked=False)
    assert total(plain) == total(signed)
    assert {len(near) for near in plain.graph.values()} == {n - 1}  # a cohort as small as this has the complete graph
    assert signed.bytes_up - plain.bytes_up == n * SIGNATURE + n * SIGNATURE
    assert signed.bytes_down - plain.bytes_down == n * (n - 1) * SIGNATURE + n * n * 4 + n * n * (4 + SIGNATURE)
    masked = secure()
    total(masked)
    assert (masked.bytes_up, masked.bytes_down) == (signed.bytes_up, signed.bytes_down)


def test_a_key_that_the_server_swapped_is_seen():
    class Swapping(LocalParties):
        def share(self, keys):
            false = Client(3, 7).advertise() + keys[0][3][-SIGNATURE:]
            return super().share({**keys, 0: {**keys[0], 3: false}})

    with pytest.raises(RoundAborted, match="client 0 got public keys that client 3 did not sign in this round"):
        total(secure(parties=Swapping()))


def test_keys_of_another_round_are_seen():
    keys = {i: Ed25519PrivateKey.generate() for i in (1, 2)}
    known = {i: key.public_key().public_bytes_raw() for i, key in keys.items()}
    before, now = (Client(1, 2, Witness(1, keys[1], known, label)) for label in (b"round 4", b"round 5"))
    other = Client(2, 2, Witness(2, keys[2], known, b"round 5"))
    other.share({1: now.advertise()})
    with pytest.raises(RoundAborted, match="client 2 got public keys that client 1 did not sign in this round"):
        other.share({1: before.advertise()})


class Splitting(LocalParties):
    """A server that wants the upload of client 9, and tells some clients that 9 uploaded, and others that it did not.

    told: clients to whom it says so; it then asks each for the secret that fits.
    """

    def __init__(self, told, signers):
        super().__init__()
        self.told, self.signers, self.opened = told, signers, {MASK: 0, SELF: 0}

    def confirm(self, uploaded):
        with_it, without = tuple(range(COUNT)), tuple(range(COUNT - 1))
        return {i: self.clients[i].confirm(with_it if i in self.told else without) for i in range(COUNT - 1)}

    def reveal(self, wanted, signatures):
        for i in range(COUNT - 1):
            kind = SELF if i in self.told else MASK
            mine = {j: signatures[j] for j in self.signers(i, self.told)}
            self.clients[i].reveal({9: kind}, mine)
            self.opened[kind] += 1
        return {}


def same_side(i, told):
    return [j for j in range(COUNT - 1) if (j in told) == (i in told)]


@pytest.mark.parametrize("told", range(1, 9))
def test_a_server_that_splits_the_clients_gets_one_secret_at_most(told):
    """Of the nine clients, those who sign the same list are fewer than the quorum of seven on one side or on both."""
    parties = Splitting(set(range(told)), same_side)
    with pytest.raises(RoundAborted, match="clients signed the list of clients that uploaded, client .* needs 7"):
        total(secure(parties=parties))
    assert not all(parties.opened.values())


def test_without_the_check_the_same_server_gets_both():
    """Shamir's threshold is 5 of 10 at the usual quorum: five shares of each secret rebuild both."""
    parties = LocalParties()
    half = SecureSum(
        range(COUNT), population=COUNT, bits=32, threshold=0.5, neighbours=None, dropped={}, drop_rate=0.0, key=1,
        masked=True, parties=parties,
    )  # fmt: skip
    half.setup()
    assert half.holders_needed == 5
    shares = [parties.clients[i].reveal({9: SELF if i < 5 else MASK}) for i in range(COUNT - 1)]
    assert sum(len(share) for share in shares[:5]) == 5 and len(shares[5:]) == 4  # a fifth comes from one accomplice


def test_signatures_of_the_other_side_are_false():
    parties = Splitting({0, 1}, lambda i, told: range(COUNT - 1))
    with pytest.raises(RoundAborted, match="2 clients signed the list of clients that uploaded, client 0 needs 7"):
        total(secure(parties=parties))


def met(count=4):
    """Clients that have all shares, and their lists signed."""
    parties = LocalParties()
    sum_ = SecureSum(
        range(count), population=count, bits=32, threshold=0.75, neighbours=None, dropped={}, drop_rate=0.0, key=1,
        masked=True, consistency=True, parties=parties,
    )  # fmt: skip
    sum_.setup()
    return parties


def test_a_client_signs_one_list():
    parties = met()
    one = parties.clients[0]
    assert one.confirm([3, 0, 1]) == one.confirm([0, 1, 3])
    with pytest.raises(RoundAborted, match="client 0 refuses to sign a second list"):
        one.confirm([0, 1, 2])


def test_a_client_shares_its_secrets_once():
    """Shares among two groups of neighbours would let each group sign a list of its own and reveal one secret."""
    clients = met().clients
    keys = {i: clients[i].advertise() for i in (1, 2)}
    with pytest.raises(RoundAborted, match="client 0 refuses to share its secrets a second time"):
        clients[0].share(keys)


@pytest.mark.parametrize("false", [bytes(SIGNATURE), b"", None, "text"])
def test_false_signatures_do_not_count_and_do_not_end_the_round(false):
    """The quorum is three of four."""
    parties = met()
    signatures = {i: parties.clients[i].confirm(range(4)) for i in range(4)}
    few = {**signatures, 2: false, 3: false}
    with pytest.raises(RoundAborted, match="2 clients signed the list of clients that uploaded, client 0 needs 3"):
        parties.clients[0].reveal({1: SELF}, few)
    assert parties.clients[0].reveal({1: SELF}, {**signatures, 3: false, 9: signatures[3]}).keys() == {1}


def test_a_client_that_is_listed_twice_counts_once():
    with pytest.raises(RoundAborted, match="client 0 refuses to sign a list of 2 clients that cannot be right"):
        met().clients[0].confirm([0, 1, 1, 1])


@pytest.mark.parametrize("listed", [(1, 2, 3), (0, 1), (0, 1, 7)])
def test_a_list_without_the_client_too_short_or_with_strangers_is_not_signed(listed):
    with pytest.raises(RoundAborted, match=r"client 0 refuses to sign a list of \d clients that cannot be right"):
        met().clients[0].confirm(listed)


@pytest.mark.parametrize("kind", [SELF, MASK])
def test_a_secret_against_the_list_stays(kind):
    parties = met()
    signatures = {i: parties.clients[i].confirm([0, 1, 2]) for i in range(3)}
    owner = 3 if kind == SELF else 1
    with pytest.raises(RoundAborted, match=f"client 0 is asked for a secret of client {owner} against the list"):
        parties.clients[0].reveal({owner: kind}, signatures)
    assert parties.clients[0].reveal({1: SELF, 3: MASK}, signatures).keys() == {1, 3}


def test_signatures_of_the_keys_of_another_round_do_not_count():
    """Each round has fresh keys, to which the list is bound, so a server cannot use old signatures of the same list."""
    old, new = met(), met()
    signatures = {i: old.clients[i].confirm(range(4)) for i in range(4)}
    new.clients[0].confirm(range(4))
    with pytest.raises(RoundAborted, match="0 clients signed the list of clients that uploaded, client 0 needs 3"):
        new.clients[0].reveal({1: SELF}, signatures)


def test_nothing_is_revealed_before_a_list_is_signed():
    with pytest.raises(RoundAborted, match="0 clients signed the list of clients that uploaded, client 0 needs 3"):
        met().clients[0].reveal({1: SELF})


@pytest.mark.parametrize("count", [3, 10, 20, 57])
def test_the_quorum_leaves_no_room_for_two_lists(count):
    """By counting: with c accomplices, who sign both lists, and honest clients, who sign one, two lists of T signatures
    need 2 (T - c) <= n - c. The message says the smallest quorum without room, rounded up to three digits."""
    bad = accomplices(count, count)
    room = {t: 2 * (t - bad) <= count - bad for t in range(2, count + 1)}
    least = next(t for t in room if not room[t])
    assert all(room[t] for t in room if t < least) and not any(room[t] for t in room if t >= least)
    for t in range(max(2, bad + 1), count + 1):
        config = toy.config(
            "secagg=full", "secure.consistency=true", f"secure.quorum={math.floor(1e6 * t / count) / 1e6}"
        )
        assert needed(config.secure.quorum, count) == t
        fault = unsafe(count, count, config)
        assert (fault is not None) == room[t], t
        if fault:
            enough = float(fault.split("raise it to ")[1].split(",")[0])
            assert needed(enough, count) in (least, least + 1)


def test_accomplices_among_all_clients_count_though_few_hold_data():
    """Nodes do not know who holds data. Of 9 others, drawn from 99 with 10 accomplices, all are accomplices with a
    probability of 10 / C(99, 9) = 5.8e-12, which is above 2^-40 = 9.1e-13. So 2 q > 10 + 9 needs all ten signatures."""
    more = ("secagg=full", "secure.consistency=true", "partition.clients=100")
    fault = unsafe(10, 10, toy.config(*more, "secure.quorum=0.7"))
    assert fault.startswith("secure.quorum=0.7 lets a server with 9 accomplices") and fault.endswith("raise it to 1")
    assert unsafe(10, 10, toy.config(*more, "secure.quorum=1.0")) is None


def test_a_larger_cohort_is_a_remedy_where_there_are_more_clients():
    """42 of 140 may collude, see test_secagg.py; two lists need more than (140 + 42) / 2: 92 / 140 = 0.6571."""
    more = ("secagg=full", "secure.consistency=true", "partition.clients=1400", "secure.quorum=0.6")
    assert unsafe(140, 1400, toy.config(*more)).endswith("clients signed; raise it to 0.658, or raise cohort")


def test_options():
    fault = unsafe(10, 10, toy.config("secagg=full", "secure.consistency=true"))
    assert fault.startswith("secure.quorum=0.5 lets a server with 1 accomplices get two lists of")
    config = toy.config("secagg=full", "secure.consistency=true", "secure.neighbours=4", "secure.quorum=0.9")
    assert (
        unsafe(10, 10, config) == "secure.consistency=true makes all clients neighbours; set secure.neighbours to null"
    )
    with pytest.raises(ConfigError, match="secure.consistency=true checks no sum with secagg=none; set secagg=full"):
        toy.config("secure.consistency=true")


def test_a_run_has_the_sums_of_one_without_it():
    options = ("secagg=full", "secure.quorum=0.8", "tasks=2", "rounds=2")
    runs = [
        cfl.run(toy.config(*options, more), stream=toy.stream())
        for more in ("secure.consistency=false", "secure.consistency=true")
    ]
    assert all((a == b).all() for a, b in zip(*(run.params.values() for run in runs), strict=True))
    assert all(b > a for a, b in pairwise(run.metrics["bytes_up"] for run in runs))


@pytest.mark.parametrize(
    ("uploaded", "keys"),
    [
        ([1, 3], {1: b"A", 2: b"B"}),
        ([1, 2], {1: b"A", 2: b"A"}),
        ([1, 2], {1: b"B", 2: b"A"}),
        ([1, 2], {1: b"A", 3: b"B"}),
    ],
)
def test_what_clients_sign_tells_who_uploaded_and_whose_each_key_is(uploaded, keys):
    assert _list_text(uploaded, keys) != _list_text([1, 2], {1: b"A", 2: b"B"})


def test_signatures_of_a_list_of_another_round_do_not_count():
    keys = {i: Ed25519PrivateKey.generate() for i in range(4)}
    known = {i: key.public_key().public_bytes_raw() for i, key in keys.items()}

    def exchanged(label):
        clients = {i: Client(i, 3, Witness(i, keys[i], known, label)) for i in range(4)}
        sent = {i: one.advertise() for i, one in clients.items()}
        shares = {i: one.share({j: sent[j] for j in sent if j != i}) for i, one in clients.items()}
        for i, one in clients.items():
            one.receive({j: shares[j].sealed[i] for j in shares if j != i})
        return clients

    old, new = exchanged(b"round 4"), exchanged(b"round 5")
    signatures = {i: one.confirm(range(4)) for i, one in old.items()}
    new[0].confirm(range(4))
    with pytest.raises(RoundAborted, match="0 clients signed the list"):
        new[0].reveal({1: SELF}, signatures)
