"""Secure aggregation: exact sums under drop-outs, uniform masks, tampering, thresholds, bytes, bounds of the graph."""

import math
from collections import Counter
from copy import deepcopy
from fractions import Fraction
from itertools import combinations, product

import numpy as np
import pytest
import scipy.stats
from Crypto.Cipher import AES
from Crypto.Hash import SHA256
from Crypto.Protocol.KDF import HKDF
from Crypto.Protocol.SecretSharing import Shamir
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from hypothesis import given, settings
from hypothesis import strategies as st

from cfl.aggregation import parties
from cfl.aggregation.mask_graph import ABORT, BREACH, CORRUPT, accomplices, connected, degree, graph, needed
from cfl.aggregation.parties import LocalParties
from cfl.aggregation.secagg import SecureSum
from cfl.aggregation.secagg_client import CHUNK, MASK, SELF, SHARE_OF, Client
from cfl.contract import STAGES
from cfl.core import RoundAborted
from tests import toy

stages = st.sampled_from(STAGES)


def _vectors(ids, size=7, bits=64, seed=0):
    draw = np.random.default_rng(seed)
    return {i: draw.integers(0, 2**bits, size, dtype=f"u{bits // 8}") for i in ids}


def _round(
    ids, dropped=None, *, bits=64, threshold=0.5, neighbours=10**6, masked=True, key=1, population=None, parties=None
):
    return SecureSum(
        ids,
        population=population or len(ids),
        bits=bits,
        threshold=threshold,
        neighbours=neighbours,
        dropped=dropped or {},
        drop_rate=0.1,
        key=key,
        masked=masked,
        parties=parties,
    )


def _sum(secure, vectors):
    """Return the round's sum and None, or None and the reason for the abort."""
    try:
        secure.setup()
        for i in secure.uploading:
            secure.add(i, vectors[i])
        return secure.close().tolist(), None
    except RoundAborted as error:
        return None, str(error)


def _plain(ids, vectors, bits=64):
    return [sum(column) % 2**bits for column in zip(*(vectors[i].tolist() for i in ids), strict=True)]


def _fewest(threshold, clients):
    return max(2, math.ceil(Fraction(str(threshold)) * clients))


def _survivors(links, dropped, threshold):
    """Return the clients in the sum, or None for an aborted round, by the rules of the protocol on sets."""
    t = _fewest(threshold, 1 + max(map(len, links.values())))
    here = set(links)
    stays = {}
    for stage in STAGES:
        here = stays[stage] = {i for i in here if dropped.get(i) != stage}
        if len(here) < _fewest(threshold, len(links)):
            return None
        owners = stays["keys"] if stage == "keys" else stays["shares"]
        if stage in ("upload", "unmask"):  # clients that uploaded, or that share a mask with one
            owners = {i for i in owners if {i, *links[i]} & stays["upload"]}
        if any(len({i, *links[i]} & here) < t for i in owners):
            return None
        if stage == "upload" and not _connected(links, here):
            return None
    return sorted(stays["upload"])


# --- sums ------------------------------------------------------------------------------------------------------------


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_any_drop_outs_that_leave_enough_clients_give_the_exact_sum(data):
    # complete graph: every client holds a share of every secret, so enough clients are enough holders
    ids = data.draw(st.lists(st.integers(0, 10**6), min_size=3, max_size=12, unique=True))
    threshold = data.draw(st.sampled_from([0.1, 0.5, 0.7]))
    bits = data.draw(st.sampled_from([16, 32, 64]))
    most = len(ids) - _fewest(threshold, len(ids))
    dropped = data.draw(st.dictionaries(st.sampled_from(ids), stages, max_size=most))
    vectors = _vectors(ids, data.draw(st.integers(0, 9)), bits)
    before = {i: vector.copy() for i, vector in vectors.items()}
    left = sorted(i for i in ids if dropped.get(i) in (None, "unmask"))
    for masked in (True, False):
        secure = _round(ids, dropped, bits=bits, threshold=threshold, masked=masked)
        assert _sum(secure, vectors) == (_plain(left, vectors, bits), None)
        assert list(secure.uploading) == left
    assert all((vectors[i] == before[i]).all() for i in ids)


@pytest.mark.slow
@given(st.data())
@settings(max_examples=12, deadline=None)
def test_on_a_sparse_graph_a_round_ends_as_the_rules_say(data):
    count = data.draw(st.integers(3, 200))
    ids, k = range(5, 5 + count), data.draw(st.integers(2, 8))
    threshold = data.draw(st.sampled_from([0.3, 0.5]))
    dropped = data.draw(st.dictionaries(st.sampled_from(ids), stages, max_size=max(1, count // 8)))
    vectors = _vectors(ids)
    rounds = [_round(ids, dropped, threshold=threshold, neighbours=k, masked=masked) for masked in (True, False)]
    (total, why), plain = (_sum(secure, vectors) for secure in rounds)
    assert plain == (total, why)
    assert rounds[0].bytes_up == rounds[1].bytes_up and rounds[0].bytes_down == rounds[1].bytes_down
    survivors = _survivors(rounds[0].graph, dropped, threshold)
    assert total == (None if survivors is None else _plain(survivors, vectors))


@pytest.mark.parametrize("count", toy.quick(3, 4, 10, of=range(3, 201)))
def test_drop_outs_to_the_quorum_leave_the_sum_and_one_more_ends_the_round(count):
    """At every stage, on the complete graph. Masks do not change who is left, so only small cohorts have them."""
    ids, vectors = range(count), _vectors(range(count))
    most = count - _fewest(0.55, count)
    for stage in STAGES:
        for masked in {False, count <= 24}:
            dropped = dict.fromkeys(range(most), stage)
            left = ids if stage == "unmask" else ids[most:]
            secure = _round(ids, dropped, threshold=0.55, masked=masked)
            assert _sum(secure, vectors) == (_plain(left, vectors), None), stage
            _, why = _sum(_round(ids, dropped | {most: stage}, threshold=0.55, masked=masked), vectors)
            assert why.startswith(f"{count - most - 1} of {count} clients are left after stage {stage}, "), stage


class Shuffled(LocalParties):
    """Clients whose messages arrive in the opposite order at every stage."""

    def __getattribute__(self, name):
        found = super().__getattribute__(name)
        if name not in ("share", "receive", "reveal"):
            return found

        def backwards(messages, *more):
            turned = {id: dict(reversed(own.items())) for id, own in reversed(messages.items())}
            answer = found(turned, *more)
            return answer and dict(reversed(answer.items()))

        return backwards


@pytest.mark.parametrize("dropped", [{}, dict(zip((0, 3, 7, 8), STAGES))])
def test_the_order_of_messages_does_not_matter(dropped):
    vectors, secure = _vectors(range(12)), _round(range(12), dropped, parties=Shuffled())
    secure.setup()
    for i in reversed(secure.uploading):
        secure.add(i, vectors[i])
    left = [i for i in range(12) if dropped.get(i) in (None, "unmask")]
    assert secure.close().tolist() == _plain(left, vectors)


def test_a_drop_out_whose_neighbours_all_drop_out_leaves_the_sum_exact():
    ids, vectors, sums = range(12), _vectors(range(12)), 0
    for key in range(30):
        lone, other = np.random.default_rng(key).permutation(12)[:2].tolist()
        dropped = dict.fromkeys((lone, *graph(ids, 3, key)[lone], other), "upload")
        masked, bare = (_round(ids, dropped, neighbours=3, masked=masked, key=key) for masked in (True, False))
        total, why = _sum(masked, vectors)
        assert (total, why) == _sum(bare, vectors)
        survivors = _survivors(masked.graph, dropped, 0.5)
        assert total == (None if survivors is None else _plain(survivors, vectors))
        sums += total is not None
    assert sums


class Forgetful(LocalParties):
    """Clients that are saved and restored after every message."""

    def __getattribute__(self, name):
        found = super().__getattribute__(name)
        if name not in ("advertise", "share", "receive", "mask", "reveal"):
            return found

        def stage(*message):
            answer = found(*message)
            self.clients = {i: Client.restored(deepcopy(client.saved())) for i, client in self.clients.items()}
            return answer

        return stage


@pytest.mark.parametrize("dropped", [{}, dict(zip((0, 3, 7, 8), STAGES))])
def test_clients_that_are_saved_and_restored_between_the_stages_give_the_same_sum(dropped):
    vectors, parties = _vectors(range(12)), Forgetful()
    secure = _round(range(12), dropped, parties=parties)
    left = [i for i in range(12) if dropped.get(i) in (None, "unmask")]
    assert _sum(secure, vectors) == (_plain(left, vectors), None)
    for i in left:  # they remember what they have done
        with pytest.raises(RoundAborted, match=f"client {i} refuses to mask a second vector"):
            parties.clients[i].mask(vectors[i])
        with pytest.raises(RoundAborted, match=f"client {i} refuses to reveal both secrets of client {i}"):
            parties.reveal({i: {i: MASK}}, None)


def test_a_vector_longer_than_a_chunk_of_the_mask():
    size = CHUNK + 3  # two whole chunks of 2-byte entries and a short one
    vectors = _vectors(range(4), size, bits=16)
    assert _sum(_round(range(4), {3: "upload"}, bits=16), vectors) == (_plain(range(3), vectors, 16), None)


def test_the_number_of_neighbours_comes_from_the_bounds():
    secure = _round(range(64), {3: "upload"}, neighbours=None, masked=False)
    assert {len(near) for near in secure.graph.values()} == {degree(64, 64, threshold=0.5, dropped=0.1)}
    secure = _round(range(64), neighbours=None, masked=False, population=6400)
    assert {len(near) for near in secure.graph.values()} == {degree(64, 6400, threshold=0.5, dropped=0.1)}


# --- secrecy ---------------------------------------------------------------------------------------------------------


class Recorder:
    """Client that records every message as (method, arguments, answer)."""

    def __init__(self, *arguments):
        self.client, self.log = Client(*arguments), []

    def __getattr__(self, name):
        def method(*arguments):
            answer = getattr(self.client, name)(*arguments)
            self.log.append((name, arguments, answer))
            return answer

        return method

    def uploaded(self):
        return next(answer for name, _, answer in self.log if name == "mask")


def _recorded(monkeypatch, ids, dropped=None, **kwargs):
    """Run a whole round; return its clients, which record their messages, and the round."""
    monkeypatch.setattr(parties, "Client", Recorder)
    secure = _round(ids, dropped, **kwargs)
    total, why = _sum(secure, _vectors(ids, 10_000))
    assert why is None
    return secure.parties.clients, secure


def test_a_lone_upload_is_uniform(monkeypatch):
    clients, _ = _recorded(monkeypatch, range(4))
    for i, vector in _vectors(range(4), 10_000).items():
        upload = clients[i].uploaded()
        counts = np.bincount(upload.view(np.uint8), minlength=256)
        assert scipy.stats.chisquare(counts).pvalue > 1e-6  # one false alarm in 250,000 runs of this test
        # 1e4 independent entries: standard deviation 0.01
        assert abs(np.corrcoef(upload.astype(float), vector.astype(float))[0, 1]) < 0.05


class Told(LocalParties):
    """Clients that were told "model", but for client 2. other: what that one was told."""

    told = b"model"

    def __init__(self, other):
        super().__init__()
        self.other = other

    def mask(self, id, vector):
        return self.clients[id].mask(vector, self.other if id == 2 else self.told)


@pytest.mark.parametrize("dropped", [{}, {3: "upload"}])
def test_masks_of_clients_that_were_told_different_things_do_not_cancel(dropped):
    vectors, left = _vectors(range(5), 10_000), [i for i in range(5) if i not in dropped]
    plain = np.array(_plain(left, vectors), np.uint64)
    same, other = (np.array(_sum(_round(range(5), dropped, parties=Told(told)), vectors)[0], np.uint64)
                   for told in (b"model", b"zeros"))  # fmt: skip
    assert (same == plain).all()
    counts = np.bincount((other - plain).view(np.uint8), minlength=256)
    assert scipy.stats.chisquare(counts).pvalue > 1e-6  # uniform, with one false alarm in 250,000 runs


def test_no_two_runs_and_no_two_clients_share_a_mask(monkeypatch):
    vectors = _vectors(range(4), 10_000)
    runs = [_recorded(monkeypatch, range(4), key=1) for _ in range(2)]
    assert runs[0][1].graph == runs[1][1].graph
    masks = [clients[i].uploaded() - vectors[i] for clients, _ in runs for i in range(4)]
    # 28 pairs x 1e4 entries of 64 bits: two agree with probability 2e-14
    assert not any((a == b).any() for a, b in combinations(masks, 2))


def _derive(secret, purpose, size=16):
    return HKDF(secret, size, b"", SHA256, context=purpose)


def _stream(key, size):
    return np.frombuffer(AES.new(key, AES.MODE_CTR, nonce=b"", initial_value=0).encrypt(bytes(8 * size)), np.uint64)


def test_masks_by_the_formula(monkeypatch):
    # Another library's HKDF and AES, from the clients' seeds: y_i - x_i = PRG(b_i) +- PRG(s_ij).
    clients, _ = _recorded(monkeypatch, range(4), {3: "upload"})
    vectors, size = _vectors(range(4), 10_000), 10_000

    def pair(i, j):
        own = X25519PrivateKey.from_private_bytes(_derive(clients[i].client.seeds[MASK], b"mask key", 32))
        other = X25519PublicKey.from_public_bytes(clients[j].client.advertise()[32:])
        return _stream(_derive(own.exchange(other), b"mask"), size)

    for i, j in combinations(range(4), 2):
        assert (pair(i, j) == pair(j, i)).all()
    for i in range(3):
        mask = _stream(_derive(clients[i].client.seeds[SELF], b"self-mask"), size)
        for j in range(4):
            if j != i:
                mask = mask + pair(i, j) if i < j else mask - pair(i, j)
        assert (clients[i].uploaded() - vectors[i] == mask).all()


def test_a_seed_takes_the_threshold_of_shares():
    # t = 3 of 5: any three shares give the seed; any two fit every seed (Shamir, 1979) and give another one.
    client = Client(1, 3)
    others = {i: Client(i, 3) for i in (0, 2, 3, 4)}
    keys = {i: other.advertise() for i, other in others.items()}
    _, sealed = client.share(keys)
    held = {1: client.held[1]}
    for i, other in others.items():
        other.share({1: client.advertise()} | {j: key for j, key in keys.items() if j != i})
        other.receive({1: sealed[i]})
        held[i] = other.held[1]
    for kind, part in SHARE_OF.items():
        shares = [(holder + 1, parts[part]) for holder, parts in sorted(held.items())]
        assert {Shamir.combine(list(some)) for some in combinations(shares, 3)} == {client.seeds[kind]}
        assert client.seeds[kind] not in {Shamir.combine(list(some)) for some in combinations(shares, 2)}


# --- refusals and tampering ------------------------------------------------------------------------------------------


def _pair():
    a, b = Client(1, 2), Client(2, 2)
    letters = a.share({2: b.advertise()})[1], b.share({1: a.advertise()})[1]
    b.receive({1: letters[0][2]})
    a.receive({2: letters[1][1]})
    return a, b


@pytest.mark.parametrize("kinds", [(SELF, MASK), (MASK, SELF)])
def test_a_client_reveals_one_secret_of_another_and_not_both(kinds):
    a, _ = _pair()
    assert a.reveal({2: kinds[0]}) == a.reveal({2: kinds[0]})
    with pytest.raises(RoundAborted, match="client 1 refuses to reveal both secrets of client 2"):
        a.reveal({2: kinds[1]})


def test_a_client_keeps_its_own_mask_key():
    a, _ = _pair()
    with pytest.raises(RoundAborted, match="client 1 refuses"):
        a.reveal({1: MASK})


def test_messages_about_strangers_and_keys_that_are_none_end_the_round():
    a, b, stranger = Client(1, 2), Client(2, 2), Client(7, 2)
    sealed = b.share({1: a.advertise(), 7: stranger.advertise()}).sealed
    a.share({2: b.advertise()})
    with pytest.raises(RoundAborted, match="client 1 cannot decrypt the shares of client 7"):
        a.receive({7: sealed[1]})
    with pytest.raises(RoundAborted, match="client 1 holds no share of client 7"):
        a.reveal({7: SELF})
    for key in (b"short", bytes(64)):  # zeros are a point of low order
        with pytest.raises(RoundAborted, match="a public key of secure aggregation is not a key of X25519"):
            Client(3, 2).share({2: key})


def test_a_client_masks_once():
    a, _ = _pair()
    a.mask(np.zeros(3, np.uint32))
    with pytest.raises(RoundAborted, match="client 1 refuses to mask a second vector"):
        a.mask(np.zeros(3, np.uint32))


def test_a_client_masks_nothing_for_fewer_clients_than_the_threshold():
    alone, other = Client(1, 2), Client(2, 2)
    alone.share({2: other.advertise()})
    with pytest.raises(RoundAborted, match="client 1 holds shares of 1 clients, it needs 2"):
        alone.mask(np.zeros(3, np.uint32))


def _flipped(data, place=-1):
    data = bytearray(data)
    data[place] ^= 1
    return bytes(data)


def _tamper(monkeypatch, name, client, change_arguments=lambda x: x, change_answer=lambda x: x):
    """Change the messages to one client, or its answers."""
    method = getattr(Client, name)

    def changed(self, message, *more):
        if self.id != client:
            return method(self, message, *more)
        return change_answer(method(self, change_arguments(message), *more))

    monkeypatch.setattr(Client, name, changed)


@pytest.mark.parametrize("change", [_flipped, lambda text: _flipped(text, 0), lambda text: text[:-1], lambda text: b""])
def test_a_changed_ciphertext_is_seen(monkeypatch, change):
    _tamper(monkeypatch, "share", 1, change_answer=lambda sent: sent._replace(sealed=sent[1] | {2: change(sent[1][2])}))
    total, why = _sum(_round(range(5)), _vectors(range(5)))
    assert total is None and why.startswith("client 2 cannot decrypt the shares of client 1")


def test_a_ciphertext_for_another_is_seen(monkeypatch):
    _tamper(monkeypatch, "receive", 2, lambda sealed: sealed | {1: sealed[3], 3: sealed[1]})
    _, why = _sum(_round(range(5)), _vectors(range(5)))
    assert why.startswith("client 2 cannot decrypt the shares of client 1")


def test_ciphertexts_of_another_round_are_seen(monkeypatch):
    """Replayed: the same clients had sent them, under the keys of their earlier round."""
    before = _round(range(5))
    before.setup()
    _tamper(monkeypatch, "receive", 2, lambda sealed: sealed | {1: before._sent[1].sealed[2]})
    _, why = _sum(_round(range(5)), _vectors(range(5)))
    assert why.startswith("client 2 cannot decrypt the shares of client 1")


def test_shares_of_another_round_are_seen(monkeypatch):
    before = _round(range(5))
    _sum(before, _vectors(range(5)))
    old = before.parties.clients[0].reveal(dict.fromkeys(range(5), SELF))
    _tamper(monkeypatch, "reveal", 0, change_answer=lambda told: told | old)
    _, why = _sum(_round(range(5)), _vectors(range(5)))
    assert why == "the revealed shares do not rebuild client 0's self seed"


@pytest.mark.parametrize("half", ["cipher", "mask"])
def test_a_swapped_public_key_is_seen(monkeypatch, half):
    false = Client(1, 3).advertise()

    def swap(keys):
        return keys | {1: false[:32] + keys[1][32:] if half == "cipher" else keys[1][:32] + false[32:]}

    _tamper(monkeypatch, "share", 2, swap)  # client 2 receives a key that client 1 did not advertise
    _, why = _sum(_round(range(5)), _vectors(range(5)))
    assert why.startswith("client 1 cannot decrypt the shares of client 2")  # the first of the two to decrypt


@pytest.mark.parametrize(("owner", "kind"), [(2, SELF), (4, MASK)])
def test_a_false_share_is_seen(monkeypatch, owner, kind):
    _tamper(monkeypatch, "reveal", 0, change_answer=lambda told: told | {owner: _flipped(told[owner])})
    _, why = _sum(_round(range(5), {4: "upload"}), _vectors(range(5)))
    assert why == f"the revealed shares do not rebuild client {owner}'s {kind} seed"


# --- thresholds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_too_few_clients_end_the_round_at_once(stage, masked):
    # 4 of 8 are enough at threshold 0.5; 3 are not.
    vectors = _vectors(range(8))
    enough = _round(range(8), dict.fromkeys(range(4), stage), masked=masked)
    assert _sum(enough, vectors) == (_plain(range(8) if stage == "unmask" else range(4, 8), vectors), None)
    secure = _round(range(8), dict.fromkeys(range(5), stage), masked=masked)
    _, why = _sum(secure, vectors)
    assert why.startswith(f"3 of 8 clients are left after stage {stage}, 4 are needed")
    # messages before the abort count: at least 3 x 64 bytes of keys
    assert secure.bytes_up == 3 * 64 if stage == "keys" else secure.bytes_up > 8 * 64
    assert (secure.bytes_down == 0) == (stage == "keys")


def test_a_client_that_never_adds_has_dropped_out():
    vectors = _vectors(range(6))
    secure = _round(range(6))
    secure.setup()
    for i in (4, 1, 2):
        secure.add(i, vectors[i])
    assert secure.close().tolist() == _plain([1, 2, 4], vectors)
    secure = _round(range(6))
    secure.setup()
    for i in (4, 1):
        secure.add(i, vectors[i])
    with pytest.raises(RoundAborted, match="2 of 6 clients are left after stage upload, 3 are needed"):
        secure.close()


@pytest.mark.parametrize("masked", [True, False])
def test_a_client_without_its_share_holders_ends_the_round(masked):
    # A ring: two of three holders rebuild a secret. Both neighbours of client 5 are gone; six other clients stay.
    near = _round(range(9), neighbours=2).graph[5]
    secure = _round(range(9), dict.fromkeys(near, "unmask"), neighbours=2, masked=masked)
    _, why = _sum(secure, _vectors(range(9)))
    assert why.startswith("client 5 has 1 of 3 share holders left after stage unmask, 2 are needed")


@pytest.mark.parametrize("masked", [True, False])
def test_survivors_that_no_mask_joins_end_the_round(masked):
    """On a ring of 24, drop-outs at two places leave two arcs. Each has its own masks, which would cancel: the server
    would learn the sums of both arcs. Every client but the lost ones keeps two of its three share holders."""
    vectors, ring = _vectors(range(24)), [0]
    links = _round(range(24), neighbours=2).graph
    while len(ring) < 24:
        ring.append(next(j for j in links[ring[-1]] if j not in ring))
    for lost, parts in ([0], 1), ([0, 12], 2):
        gone = {ring[place]: "keys" for place in lost}
        secure = _round(range(24), gone, neighbours=2, masked=masked)
        total, why = _sum(secure, vectors)
        if parts == 1:
            assert total == _plain([i for i in range(24) if i not in gone], vectors)
        else:
            assert why.startswith("the 22 clients left after stage upload share masks in separate groups only, so ")
            assert why.endswith("raise secure.neighbours")


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_connected_is_what_walking_along_the_links_says(data):
    count = data.draw(st.integers(1, 30))
    links = graph(range(count), data.draw(st.integers(2, 4)), 3)
    kept = data.draw(st.sets(st.integers(0, count - 1), min_size=1))
    assert connected({i: links[i] for i in kept}) == _connected(links, kept)


@pytest.mark.parametrize("count", [0, 1])
def test_a_sum_of_one_is_refused(count):
    _, why = _sum(_round(range(count)), _vectors(range(count)))
    assert why.startswith(f"{count} of {count} clients are left after stage keys, 2 are needed")


def test_a_threshold_is_a_fraction_and_not_its_nearest_float():
    assert math.ceil(0.55 * 100) == 56
    for percent, n in product(range(1, 101), range(1, 201)):
        assert needed(percent / 100, n) == max(2, -(-percent * n // 100))


@pytest.mark.parametrize("threshold", [0.02, 0.3, 0.5, 0.55, 0.9])
def test_of_the_quorum_all_but_a_tenth_of_the_clients_are_honest(threshold):
    """At least one client is honest: if all clients collude with the server, no client needs protection."""
    for n in range(2, 60):
        colluding = math.ceil(Fraction(n, 10))
        secure = _round(range(n), threshold=threshold, neighbours=4, masked=False)
        assert secure.honest == max(1, _fewest(threshold, n) - colluding), n


@pytest.mark.parametrize(("n", "population"), [(2, 20), (10, 20), (10, 64), (12, 400), (64, 640), (140, 1400)])
def test_of_a_sampled_cohort_as_many_collude_as_a_tenth_of_all_clients_can_put_there(n, population):
    """Given an honest client, the n - 1 others are drawn without replacement: more accomplices than the bound have a
    probability of 2^-40 at most, in exact fractions, and one fewer would not do."""
    bad, bound, rare = math.ceil(Fraction(population, 10)), accomplices(n, population), Fraction(1, 2**40)
    assert _above(bound, population - 1, bad, n - 1) <= rare < _above(bound - 1, population - 1, bad, n - 1)
    secure = _round(range(n), threshold=0.8, neighbours=n, masked=False, population=population)
    assert secure.honest == max(1, _fewest(0.8, n) - bound)


def test_a_tenth_of_1400_puts_more_than_a_tenth_into_a_cohort_of_140_often():
    """More than 14 with a probability of 0.43, so a tenth of the cohort is no bound; 42 are. In a cohort of 10, all 9
    others are accomplices with a probability of about 1e-9, which is more than 2^-40."""
    assert float(_above(14, 1400, 140, 140)) == pytest.approx(0.43, abs=0.005)
    assert (accomplices(140, 1400), accomplices(10, 1400)) == (42, 9)
    draws = np.random.default_rng(0).hypergeometric(140, 1260, 140, 10**6)
    assert abs((draws > 14).mean() - 0.43) < 0.01 and draws.max() <= 42


@pytest.mark.parametrize("masked", [True, False])
def test_a_vector_that_does_not_fit_is_refused(masked):
    secure = _round(range(4), {3: "upload"}, bits=32, masked=masked)
    secure.setup()
    secure.add(0, np.zeros(5, np.uint32))
    with pytest.raises(ValueError, match=r"client 1 adds uint32 \(6,\), not uint32 \(5,\)"):
        secure.add(1, np.zeros(6, np.uint32))
    with pytest.raises(ValueError, match=r"client 1 adds int64 \(5,\), not uint32"):
        secure.add(1, np.zeros(5, np.int64))
    for i in (0, 3):
        with pytest.raises(ValueError, match=f"client {i} is not expected to upload"):
            secure.add(i, np.zeros(5, np.uint32))
    secure.add(1, np.ones(5, np.uint32))  # refused vectors leave no trace
    assert secure.close().tolist() == [1] * 5


# --- bytes -----------------------------------------------------------------------------------------------------------


def _size(message):
    """Bytes of a message: an id takes 4, the kind of a secret 1."""
    if isinstance(message, dict):
        return sum(4 + _size(part) for part in message.values())
    if isinstance(message, tuple):
        return sum(map(_size, message))
    if isinstance(message, np.ndarray):
        return message.nbytes
    return 1 if isinstance(message, str) else len(message or b"")


@pytest.mark.parametrize(
    ("stage", "undelivered"),  # bytes sent to client 1 after it left: keys of six neighbours; seven kinds of secrets
    [(None, 0), ("keys", 0), ("upload", 0), ("shares", 6 * (4 + 64)), ("unmask", 7 * (4 + 1))],
)
def test_counted_bytes_are_those_of_the_messages(monkeypatch, stage, undelivered):
    dropped = {1: stage} if stage else {}
    clients, secure = _recorded(monkeypatch, range(15), dropped, neighbours=6, threshold=0.3)
    log = [entry for client in clients.values() for entry in client.log]
    names = Counter(name for name, *_ in log)
    assert set(names) == {"advertise", "share", "receive", "mask", "reveal"}
    assert secure.bytes_up == sum(_size(answer) for _, _, answer in log)
    down = sum(_size(arguments) for name, arguments, _ in log if name != "mask")  # the vector is no message
    assert secure.bytes_down == down + undelivered


# --- the graph -------------------------------------------------------------------------------------------------------


def _connected(links, kept):
    """Whether the clients `kept` are connected among themselves."""
    kept = set(kept)
    reached, waiting = set(), [next(iter(kept))]
    while waiting:
        i = waiting.pop()
        if i not in reached:
            reached.add(i)
            waiting += kept.intersection(links[i]) - reached
    return reached == kept


@given(st.integers(2, 80), st.integers(1, 90), st.integers(0, 2**62))
@settings(max_examples=60, deadline=None)
def test_the_graph_is_regular_symmetric_and_connected(n, k, key):
    ids = [3 * i + 1 for i in range(n)]
    links = graph(ids, k, key)
    expected = min(max(2, k) + (n * k * (k > 1)) % 2, n - 1)  # one more if both are odd, as no such graph exists
    assert sorted(links) == ids and all(len(set(near)) == len(near) == expected for near in links.values())
    assert all(list(near) == sorted(near) and i not in near for i, near in links.items())
    assert all(i in links[j] for i, near in links.items() for j in near)
    assert _connected(links, ids)
    assert graph(ids[::-1], k, key) == links  # independent of the order of the ids


def test_neighbours_are_drawn_anew_for_each_key():
    # Each of 19 others is a neighbour with probability 4 / 19: 2000 graphs, within 5 standard deviations.
    count, p = 2000, 4 / 19
    seen = Counter(j for key in range(count) for j in graph(range(20), 4, key)[7])
    assert all(abs(seen[j] - count * p) < 5 * math.sqrt(count * p * (1 - p)) for j in range(20) if j != 7)


@pytest.mark.parametrize(("n", "k", "gone"), [(18, 4, 4), (20, 4, 4), (16, 6, 6)])
def test_a_graph_is_cut_no_more_often_than_the_bound_says(n, k, gone):
    # Every way to lose `gone` clients; the bound of `degree` is n (gone / n)^(k // 2).
    links = graph(range(n), k, 0)
    ways = list(combinations(range(n), gone))
    cut = sum(not _connected(links, set(range(n)).difference(lost)) for lost in ways)
    assert 0 < cut / len(ways) <= n * (gone / n) ** (k // 2) < 1


def _above(most, population, marked, draws):
    """P(more than `most` of the draws without replacement are marked), exactly."""
    ways = sum(math.comb(marked, x) * math.comb(population - marked, draws - x) for x in range(most + 1, draws + 1))
    return Fraction(ways, math.comb(population, draws))


def _binomial(most, draws, chance):
    """P(more than `most` of the draws hit), exactly."""
    p = Fraction(str(chance))
    return sum(math.comb(draws, x) * p**x * (1 - p) ** (draws - x) for x in range(most + 1, draws + 1))


def _fits(n, k, threshold, dropped, population):
    """Whether k neighbours satisfy both conditions of `degree`, in exact fractions."""
    t = _fewest(threshold, k + 1)
    corrupted = _above(
        t - 1, population - 1, math.ceil(Fraction(population, 10)), k
    )  # of an honest client's neighbours
    cut = (Fraction(str(dropped)) + Fraction(1, 10)) ** (k // 2)
    starved = _binomial(k + 1 - t, k + 1, dropped)  # fewer than t of the k + 1 holders are left
    return n * (corrupted + cut) <= Fraction(1, 2**40) and n * starved <= Fraction(1, 2**20)


@pytest.mark.parametrize(
    ("n", "population", "threshold", "dropped"),
    [
        (64, 64, 0.5, 0.1),  # the cut decides
        (101, 101, 0.6, 0.0),  # no odd number of neighbours
        (300, 300, 0.4, 0.0),  # the corrupt decide
        (300, 3000, 0.4, 0.0),
        (1000, 1000, 0.5, 0.2),  # the drop-outs decide
        (256, 256, 0.5, 0.3),
    ],
)
def test_degree_is_the_fewest_that_fits(n, population, threshold, dropped):
    k = degree(n, population, threshold=threshold, dropped=dropped)
    regular = [fewer for fewer in range(2, k) if fewer * n % 2 == 0]
    assert k < n - 1 and _fits(n, k, threshold, dropped, population)
    assert not any(_fits(n, fewer, threshold, dropped, population) for fewer in regular)


@pytest.mark.parametrize("dropped", [0.0, 0.1, 0.3, 0.6])
def test_the_bound_of_the_cut_holds_for_the_accomplices_that_there_are(dropped):
    """All k / 2 clients in a row are gone: each is an accomplice, drawn without replacement, or has dropped out."""
    for n in [*range(28, 120), 1000, 4091]:
        bad = math.ceil(CORRUPT * n - 1e-9)
        for k in range(2, n - 1):
            run = k // 2
            bound = (dropped + CORRUPT) ** run
            if n * bound > BREACH:  # then the number of neighbours is refused
                continue
            among = np.arange(run + 1)
            gone = (scipy.stats.hypergeom.pmf(among, n - 1, bad, run) * dropped ** (run - among)).sum()
            assert gone <= bound, (n, k)
            break  # the smallest k is the one that is taken


def _starved(n, k, dropped, trials):
    """Share of rounds in which a client has fewer holders left than half of them; each client drops out by chance."""
    stays = np.random.default_rng(4).random((trials, n)) >= dropped
    turned = np.concatenate([stays[:, n - k // 2 :], stays, stays[:, : k // 2]], 1).cumsum(1)
    held = turned[:, k:] - np.pad(turned, ((0, 0), (1, 0)))[:, :n]  # of places i - k / 2 to i + k / 2
    return float((held < needed(0.5, k + 1)).any(1).mean())


def test_drop_outs_leave_clients_without_holders_as_rarely_as_promised():
    """With a fixed number of drop-outs, 103 neighbours would do for 256 clients and a rate of 0.3. Each client drops
    out by itself, however, and then a round is aborted for want of holders with a probability of up to 1.6e-3."""
    assert 256 * float(_binomial(104 - 52, 104, 0.3)) == pytest.approx(1.6e-3, rel=0.01)
    assert 2e-4 < _starved(256, 102, 0.3, 40_000) < 256 * float(_binomial(103 - 52, 103, 0.3))
    k = degree(256, 256, threshold=0.5, dropped=0.3)
    assert 256 * float(_binomial(k + 1 - needed(0.5, k + 1), k + 1, 0.3)) <= ABORT
    assert _starved(256, k - k % 2, 0.3, 40_000) == 0.0  # expected: 0.04 of 40,000 rounds


def test_degree_grows_as_the_logarithm():
    degrees = [degree(4**power, 4**power, threshold=0.5, dropped=0.1) for power in range(4, 8)]
    assert degrees == sorted(degrees) and degrees[2] < 2 * degrees[0]
    assert degrees[3] < 2 * degrees[0]  # 64 times as many clients


@pytest.mark.parametrize("n", [2, 3, 8, 30])
def test_few_clients_get_the_complete_graph(n):
    assert degree(n, n, threshold=0.5, dropped=0.1) == n - 1
    assert not any(_fits(n, k, 0.5, 0.1, n) for k in range(2, n - 1))


def test_a_threshold_that_drop_outs_break_gets_the_complete_graph():
    assert degree(100, 100, threshold=0.95, dropped=0.1) == 99
