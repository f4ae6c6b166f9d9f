"""Protected sum of a round: exactness against plain floats, measured noise, clipping, and what is refused."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from cfl.aggregation.gaussian import clipped, noise
from cfl.aggregation.plain import UploadSum
from cfl.aggregation.protected import UploadProtection
from cfl.contract import STAGES, Phase, Privacy, RoundInfo
from cfl.core import ConfigError, RoundAborted, UpdateError, rng, tree
from cfl.models import Model
from tests import toy

with rng.fork(1):
    MODEL = Model(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)), (4,), [3], multi_head=False)
COUNTER = "1.num_batches_tracked@0"
GATHERS = {"strategy": "mean", "local": "mean", "counts": "sum", "work": "sum"}
HIDDEN = ("dp.noise_multiplier=1", "agg.weights=uniform", "sampling=poisson", "dp.amplify=true")
CLIENT = ("dp.noise_multiplier=1", "agg.weights=uniform", "sampling=poisson", "dp.amplify=false")
EXAMPLE = ("dp.level=example", "dp.noise_multiplier=1", "agg.weights=uniform")
WORK = "dp.protect=work"  # needs a strategy with uploads of `work`
SIZE = 200_000  # entries of a noise vector; the standard error of its deviation is 1 / sqrt(2 SIZE) = 0.16 %


def protection(*overrides, multiplier=0.0, method="fedavg"):
    return UploadProtection(toy.config(*overrides, method=method), multiplier)


def info_of(ids, dropped=None, expected=3.0, key=5, phase=Phase("train", work=True), hidden=False, owners=None):
    """hidden: whether the cohort and its size are protected; otherwise no sum uses `expected`."""
    return RoundInfo(
        task=0,
        tasks=1,
        phase=phase,
        round=2,
        clients=tuple(ids),
        names=(),
        frozen=frozenset(),
        heads=(0,),
        population=9,
        lr=0.1,
        model=MODEL,
        key=key,
        owners=owners or len(ids),
        expected=expected,
        dropped=dropped or {},
        privacy=Privacy("client", 1.0, hidden=True) if hidden else None,
    )


def summed(protected, info, uploads, weights=None, gathers=GATHERS):
    """Run a round as an engine does; return the result for the server, and the sum."""
    total = protected.sum(info, gathers)
    total.open()
    for id in info.uploading:
        assert total.add(id, uploads[id], weights[id] if weights else 1.0)
    return total.close(), total


def random_uploads(ids, scale=1.0):
    def leaf(id, name, *shape):
        return scale * torch.randn(shape, generator=rng.generator(rng.key(id, name)))

    return {
        id: {
            "strategy": {"w": leaf(id, "w", 5, 3), "b": leaf(id, "b", 3).double()},
            "local": {"steps": leaf(id, "steps")},
            "counts": {"c": leaf(id, "c", 2, 2, 2)},
            "work": {"sketch/a": leaf(id, "a", 4, 6), "energy/a": leaf(id, "e", 2).double()},
        }
        for id in ids
    }


def constant(ids, owner="strategy", value=0.0, size=SIZE):
    return {id: {owner: {"v": torch.full((size,), value, dtype=torch.float64)}} for id in ids}


def mapped(fn, parts):
    return {owner: tree.map(fn, leaves) for owner, leaves in parts.items()}


def sums(parts, divisor):
    """Undo the division of the means."""
    return {owner: tree.scale(leaves, divisor if GATHERS[owner] == "mean" else 1.0) for owner, leaves in parts.items()}


def same(one, other):
    return all(torch.equal(leaf, other[owner][name]) for owner, part in one.items() for name, leaf in part.items())


def only(parts):
    """The single leaf of all parts."""
    (leaves,) = parts.values()
    (leaf,) = leaves.values()
    return leaf


def assert_deviation(values, std):
    """The root mean square of n centred normal draws is within 5 of its own deviations, std / sqrt(2 n)."""
    measured = float(values.double().square().mean().sqrt())
    assert measured == pytest.approx(std, rel=5 / math.sqrt(2 * values.numel()))


def correlation(a, b):
    return abs(float(np.corrcoef(a.numpy(), b.numpy())[0, 1]))


# --- integers and masks ----------------------------------------------------------------------------------------------

SETTINGS = {
    "samples": (("agg.weights=samples",), "fedavg"),
    "uniform": (("agg.weights=uniform",), "fedavg"),
    "client": (CLIENT, "fedavg"),
    "client-work": ((*CLIENT[:1], CLIENT[2], WORK), "fot"),
    "example": (EXAMPLE, "fedavg"),
    "example-work": ((*EXAMPLE[:2], WORK, "strategy.sketch=gram", "strategy.project_at=server"), "fot"),
}
DROPPED = {1: "keys", 3: "shares", 4: "upload", 6: "unmask"}  # one at every stage; 4 of 8, the quorum, stay to the end


@pytest.mark.parametrize("setting", SETTINGS)
def test_masks_change_nothing_to_the_bit_under_drop_outs_at_every_stage(setting):
    overrides, method = SETTINGS[setting]
    ids, uploads = range(8), random_uploads(range(8))
    weights = {id: float(id + 1) if setting.endswith(("samples", "work")) else 1.0 for id in ids}
    info = info_of(ids, DROPPED)
    assert set(DROPPED.values()) == set(STAGES) and info.uploading == (0, 2, 5, 6, 7)
    found = {}
    for secagg in ("sum", "full"):
        protected = protection(*overrides, f"secagg={secagg}", multiplier=1.5, method=method)
        found[secagg] = summed(protected, info, uploads, weights)
    (plain, bare), (parts, masked) = found["sum"], found["full"]
    assert masked.traffic() == bare.traffic() and min(masked.traffic()) > 0
    assert (masked.noise, masked.clipped, masked.shortened) == (bare.noise, bare.clipped, bare.shortened)
    assert same(plain, parts)
    assert {owner: list(leaves) for owner, leaves in parts.items()} == {
        owner: list(leaves) for owner, leaves in uploads[0].items()
    }
    for owner, leaves in uploads[0].items():
        for name, leaf in leaves.items():
            assert (parts[owner][name].dtype, parts[owner][name].shape) == (leaf.dtype, leaf.shape)


@pytest.mark.parametrize(("bits", "fraction_bits"), [(32, 8), (64, 8), (64, 24)])
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_the_sum_is_that_of_floats_within_its_rounding(weighting, fraction_bits, bits):
    """The rounding error of each of C addends is half a unit, 2^-(f+1), at most; a mean divides it by the weights. The
    leaf's type rounds the result."""
    ids = range(8)
    uploads, weights = random_uploads(ids), {id: float(3 * id + 1) if weighting == "samples" else 1.0 for id in ids}
    options = (f"agg.weights={weighting}", f"secure.fraction_bits={fraction_bits}", f"secure.bits={bits}")
    info = info_of(ids, DROPPED)
    parts, total = summed(protection(*options, "secagg=full"), info, uploads, weights)
    assert total.clipped == total.shortened == 0 and total.noise == 0.0
    sent, half, worst = info.uploading, 2.0 ** -(fraction_bits + 1), 0.0
    for owner, leaves in uploads[0].items():
        mean = owner in ("strategy", "local")
        whole = sum(weights[id] for id in sent) if mean else 1.0
        for name, leaf in leaves.items():
            exact = sum((weights[id] if mean else 1.0) * uploads[id][owner][name].double() for id in sent) / whole
            off = (parts[owner][name].double() - exact).abs()
            assert (off <= len(sent) * half / whole + exact.abs() * torch.finfo(leaf.dtype).eps).all(), name
            worst = max(worst, float((off * whole / half).max()))
    if fraction_bits == 8:
        assert worst > 0.5  # integers were summed indeed


def test_the_order_of_names_does_not_matter():
    """Uploads are summed by name, as without protection."""
    uploads = random_uploads(range(3))
    swapped = {owner: dict(reversed(leaves.items())) for owner, leaves in reversed(uploads[1].items())}
    protected, info = protection("secagg=sum", "agg.weights=uniform"), info_of(range(3))
    straight, _ = summed(protected, info, uploads)
    mixed, _ = summed(protected, info, {**uploads, 1: swapped})
    assert same(straight, mixed)


@pytest.mark.parametrize("options", [("secagg=full",), (*CLIENT, "secagg=sum"), CLIENT], ids="+".join)
def test_sums_of_clients_that_send_in_another_order_can_be_merged(options):
    """Each client has its own partial sum, which therefore sees this client's order first."""
    uploads = random_uploads(range(4))
    for id in (1, 3):
        swapped = {owner: dict(reversed(leaves.items())) for owner, leaves in uploads[id].items()}
        uploads[id] = dict(reversed(swapped.items()))
    protected, info = protection(*options, "agg.weights=uniform", multiplier=0.1), info_of(range(4))
    whole = protected.sum(info, GATHERS)
    whole.open()
    for id in range(4):
        part = protected.sum(info, GATHERS)
        part.add(id, uploads[id], 1.0)
        whole.merge(part.part())
    assert same(summed(protected, info, uploads)[0], whole.close())


def test_bytes_of_a_masked_sum_are_those_of_its_vectors_and_more():
    """A vector has the weight and 15 + 3 + 1 + 8 + 24 + 2 entries of 8 bytes each. Keys, shares and unmasking take
    bytes independent of its length, so each further entry costs 8 bytes per client."""
    info, ids = info_of(range(4)), range(4)
    _, total = summed(protection("secagg=full"), info, random_uploads(ids))
    longer = {id: {**parts, "more": {"m": torch.zeros(10)}} for id, parts in random_uploads(ids).items()}
    _, other = summed(protection("secagg=full"), info, longer, gathers={**GATHERS, "more": "sum"})
    assert total.traffic()[0] > 4 * 8 * 54
    assert other.traffic()[0] - total.traffic()[0] == 4 * 8 * 10 and other.traffic()[1] == total.traffic()[1]


@pytest.mark.parametrize("secagg", ["sum", "full"])
def test_too_few_clients_abort_and_their_bytes_count(secagg):
    total = protection(f"secagg={secagg}").sum(info_of(range(4), {1: "shares", 2: "upload", 3: "unmask"}), GATHERS)
    total.open()
    uploads = random_uploads(range(4))
    assert total.add(0, uploads[0], 1.0) and total.add(3, uploads[3], 1.0)
    with pytest.raises(RoundAborted, match="1 of 4 clients are left after stage unmask, 2 are needed"):
        total.close()
    assert total.traffic()[0] > 2 * 8 * 54


@pytest.mark.parametrize("options", [("secagg=sum",), ("secagg=full",), ("secagg=sum", *CLIENT)], ids="+".join)
@pytest.mark.parametrize("ids", [(), (2,)])
def test_a_cohort_of_none_or_one_is_aborted_where_sums_are_secure(ids, options):
    """Poisson cohorts may be that small; the sum of one client is its upload."""
    total = protection(*options).sum(info_of(ids), GATHERS)
    with pytest.raises(RoundAborted, match=f"{len(ids)} of {len(ids)} clients are left after stage keys, 2 are needed"):
        total.open()


def test_what_is_not_sent_up_needs_no_protection():
    protected = protection(*CLIENT, "secagg=full", multiplier=1.0)
    for phase in (
        Phase("look", train=False, work=True, diagnostic=True),
        Phase("keep", train=False, work=True, stores=True),
    ):
        assert type(protected.sum(info_of((0, 1), phase=phase), GATHERS)) is UploadSum
    assert type(protection().sum(info_of((0, 1)), GATHERS)) is UploadSum


# --- the noise that is there -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "divisor"), [(HIDDEN, 3.0), (CLIENT, 4.0)])
@pytest.mark.parametrize("clip", [0.5, 4.0])
def test_the_servers_noise_has_the_deviation_that_is_claimed(clip, options, divisor):
    """Client level without secure aggregation: the sum has noise clip * sigma once. The mean divides by the 3 expected
    clients if the number of clients is protected, else by the 4 that have sent."""
    protected = protection(*options, f"dp.clip={clip}", multiplier=1.5)
    info = info_of(range(5), {1: "upload"}, hidden=options is HIDDEN)
    parts, total = summed(protected, info, constant(range(5)))
    assert total.noise == 1.5 * clip
    assert_deviation(divisor * only(parts), 1.5 * clip)
    parts, _ = summed(protected, info, constant(range(5), "work"))
    assert_deviation(only(parts), 1.5 * clip)


def test_noise_is_centred_and_normal():
    """The mean of n draws is within 5 / sqrt(n), the fourth moment within 5 sqrt(96 / n) of 3 (its variance is 96)."""
    draws = noise(torch.zeros(SIZE, dtype=torch.float64), 1.0, 3)
    assert abs(float(draws.mean())) < 5 / math.sqrt(SIZE)
    assert abs(float((draws**4).mean()) - 3) < 5 * math.sqrt(96 / SIZE)
    assert noise(torch.zeros(3, 2), 1.0, 3).dtype == torch.float32


QUORUM = {0: "unmask", 1: "unmask"}  # 4 of 6 clients, the quorum, open the sum of all 6
MASKED = [  # drop-outs, number of noise shares in the sum; the quorum of 0.6 is 4 of 6 clients
    ({}, 6),
    ({2: "keys"}, 5),
    ({2: "keys", 4: "upload"}, 4),
    (QUORUM, 6),  # both have sent their shares
    ({0: "shares", 5: "unmask"}, 5),
]


@pytest.mark.parametrize(("dropped", "sharing"), MASKED)
def test_shares_of_noise_add_up_to_the_deviation_that_is_claimed(dropped, sharing):
    """One client of the quorum of 4, a tenth of 6 rounded up, may collude with the server, so 3 shares make up
    clip * sigma. n shares have sqrt(n / 3) times as much, and the mean divides it by n."""
    protected = protection(*CLIENT, "secagg=full", "secure.quorum=0.6", "dp.clip=2", multiplier=0.75)
    parts, total = summed(protected, info_of(range(6), dropped), constant(range(6)))
    assert total.noise == pytest.approx(1.5 * math.sqrt(sharing / 3), rel=1e-12)
    assert_deviation(sharing * only(parts), total.noise)


@pytest.mark.parametrize(("count", "colluding"), [(6, 1), (11, 2)])  # ceil(n / 10)
def test_clients_that_work_with_the_server_leave_the_noise_that_is_claimed(count, colluding):
    """They know their shares and subtract them from the sum. If only the quorum of 0.6 uploads, noise of exactly
    clip * sigma is left; if all clients upload, more is left."""
    quorum = math.ceil(0.6 * count)
    protected = protection(*CLIENT, "secagg=full", "secure.quorum=0.6", "dp.clip=2", multiplier=0.75)
    for sharing in (quorum, count):
        info = info_of(range(count), {id: "upload" for id in range(sharing, count)})
        parts, _ = summed(protected, info, constant(range(count)))
        left = sharing * only(parts)
        for id in range(colluding):
            share = 1.5 / math.sqrt(quorum - colluding)
            left -= noise(torch.zeros(SIZE, dtype=torch.float64), share, 0, "noise", info.key, id)
        assert_deviation(left, 1.5 * math.sqrt((sharing - colluding) / (quorum - colluding)))


@pytest.mark.parametrize("secagg", ["none", "full"])
def test_where_samples_are_protected_each_client_adds_all_of_the_noise(secagg):
    """Each upload is noisy enough by itself, also if all others are known; 5 of them have sqrt(5) times the noise."""
    protected = protection(*EXAMPLE, f"secagg={secagg}", "dp.clip=2", multiplier=0.75)
    uploads = {
        id: {"strategy": {"v": torch.full((7,), 2.0**-3 * id)}, **work}
        for id, work in constant(range(6), "work").items()
    }
    parts, total = summed(protected, info_of(range(6), {2: "keys"}), uploads)
    assert total.noise == pytest.approx(1.5 * math.sqrt(5), rel=1e-12)
    assert_deviation(parts["work"]["v"], total.noise)
    # local training adds its own noise, so the update is the plain mean of 0, 1, 3, 4 and 5 eighths, exact in binary
    assert torch.equal(parts["strategy"]["v"], torch.full((7,), 13 / 40))
    assert total.shortened == 0


def test_noise_finer_than_the_grid_is_refused():
    """Each of 48 clients may add as little as 4 / sqrt(48) = 0.58: above four units of 2^-3, below four of 2^-2."""
    options = ("secagg=sum", "dp.clip=8", "cohort=32", "partition.clients=48")
    with pytest.raises(ConfigError, match="secure.fraction_bits=2 rounds away noise as small as 0.58; raise it"):
        protection(*CLIENT, *options, "secure.fraction_bits=2", multiplier=0.5)
    protected = protection(*CLIENT, *options, "secure.fraction_bits=3", multiplier=0.5)
    parts, total = summed(protected, info_of(range(32)), constant(range(32), size=10_000))
    assert total.noise == pytest.approx(4 * math.sqrt(32 / 12))  # the quorum is 16, and a tenth of 32 is 4
    assert_deviation(32 * only(parts), total.noise)


def test_noise_of_samples_is_not_shared_out_and_may_be_coarser():
    """Each client adds the whole deviation of 1, which is above four units of 2^-4 and below four units of 2^-1."""
    options = (*EXAMPLE, "secagg=sum", "cohort=32", "partition.clients=48")
    parts, total = summed(
        protection(*options, "secure.fraction_bits=4", multiplier=1.0),
        info_of(range(32)),
        constant(range(32), "work", size=10_000),
    )
    assert total.noise == pytest.approx(math.sqrt(32))
    assert_deviation(only(parts), total.noise)
    with pytest.raises(ConfigError, match="secure.fraction_bits=1 rounds away noise as small as 1; raise it"):
        protection(*options, "secure.fraction_bits=1", multiplier=1.0)


def test_noise_is_the_rounds_and_the_clients_own():
    """The correlation of two independent vectors of n draws has deviation 1 / sqrt(n); the bound is 5 of these."""
    bound = 5 / math.sqrt(SIZE)
    server = protection(*CLIENT, multiplier=1.0)
    first, again, later = (only(summed(server, info_of(range(3), key=key), constant(range(3)))[0]) for key in (5, 5, 6))
    assert torch.equal(first, again) and correlation(first, later) < bound

    own = protection(*EXAMPLE, multiplier=1.0)
    alone = {
        (id, key): only(summed(own, info_of((id,), key=key), constant((id,), "work"))[0])
        for id in (0, 1)
        for key in (5, 6)
    }
    assert correlation(alone[0, 5], alone[1, 5]) < bound and correlation(alone[0, 5], alone[0, 6]) < bound
    both, _ = summed(own, info_of((0, 1)), constant((0, 1), "work"))
    assert torch.allclose(only(both), alone[0, 5] + alone[1, 5], atol=1e-12)
    assert correlation(first, alone[0, 5]) < bound


def test_noise_hides_in_every_entry_of_every_owner():
    """Uploads of zeros leave noise only, and no entry is 0."""
    uploads = dict.fromkeys(range(4), mapped(torch.zeros_like, random_uploads([0])[0]))
    for secagg in ("none", "full"):
        parts, _ = summed(protection(*CLIENT, f"secagg={secagg}", multiplier=1.0), info_of(range(4)), uploads)
        assert all(bool((leaf != 0).all()) for part in parts.values() for leaf in part.values())


# --- clipping --------------------------------------------------------------------------------------------------------


def norm(parts):
    return math.sqrt(sum(float(leaf.double().square().sum()) for part in parts.values() for leaf in part.values()))


@pytest.mark.parametrize("secagg", ["none", "full"])
def test_the_joint_norm_of_all_owners_is_at_most_the_clip(secagg):
    """The other of two clients sends zeros, so the sum is the clipped upload, with its direction. The rounding error
    of 53 integers, half a unit of 2^-40 each, has a norm that is subtracted from the clip."""
    options = (*CLIENT, f"secagg={secagg}", "secure.fraction_bits=40", "dp.clip=0.25")
    upload = mapped(torch.Tensor.double, random_uploads([0])[0])
    uploads = {0: upload, 1: mapped(torch.zeros_like, upload)}
    length = norm(uploads[0])
    assert length > 4  # far outside the ball, and no owner alone makes up the norm
    assert all(norm({owner: part}) < 0.95 * length for owner, part in uploads[0].items())
    means, total = summed(protection(*options), info_of(range(2)), uploads)
    parts = sums(means, 2.0)
    assert total.shortened == 1
    assert norm(parts) == pytest.approx(0.25, abs=2 * math.sqrt(53) * 2.0**-41)
    for owner, part in uploads[0].items():
        for name, leaf in part.items():
            assert torch.allclose(
                parts[owner][name], leaf * (0.25 / length), atol=(1 + math.sqrt(53)) * 2.0**-41, rtol=0
            )


def test_rounding_makes_no_upload_longer_than_the_clip():
    """Half a unit of 1/8 in each of five equal entries leaves 1 - sqrt(5) / 16 for their norm, so they are 0.385, which
    is rounded to 3/8. With a norm of 1 they would be 0.447 and be rounded to 4/8, whose norm is 1.12."""
    options = (*CLIENT, "secagg=full", "secure.fraction_bits=3")
    parts, _ = summed(protection(*options), info_of(range(2)), constant(range(2), value=2.0, size=5))
    assert only(parts).tolist() == [3 / 8] * 5


def test_the_work_of_a_client_is_clipped_with_its_update():
    """(3, 4) of the update and 12 of `work` have norm 13 together, so a clip of 6.5 halves all of them."""
    uploads = {0: {"strategy": {"v": torch.tensor([3.0, 4.0])}, "work": {"s": torch.tensor(12.0)}}}
    parts, total = summed(protection(*CLIENT, "dp.clip=6.5"), info_of((0,)), uploads)
    assert torch.equal(parts["strategy"]["v"], torch.tensor([1.5, 2.0])) and parts["work"]["s"].item() == 6.0
    assert total.shortened == 1


def test_inside_the_ball_nothing_changes_and_zero_stays_zero():
    inside = {0: {"strategy": {"v": torch.tensor([3.0, 4.0])}}, 1: {"strategy": {"v": torch.zeros(2)}}}
    parts, total = summed(protection(*CLIENT, "dp.clip=5"), info_of((0, 1)), inside)
    assert torch.equal(2 * only(parts), torch.tensor([3.0, 4.0])) and total.shortened == 0  # on the sphere is inside
    zero = torch.zeros(4, dtype=torch.float64)
    assert torch.equal(clipped(zero, 1e-300), zero)
    for length in (1e-200, 1e-5, 1.0, 1e5, 1e150):
        vector = length * toy.random(100, seed=3) / toy.random(100, seed=3).norm()
        assert clipped(vector, 1.0).norm() <= 1.0 + 1e-9
        assert length > 0.999 or torch.equal(clipped(vector, 1.0), vector)


def test_clients_that_were_shortened_are_counted():
    uploads = {id: {"strategy": {"v": torch.tensor([float(id)])}} for id in range(5)}
    parts, total = summed(protection(*CLIENT, "dp.clip=2.5"), info_of(range(5), {4: "keys"}), uploads)
    assert total.shortened == 1 and only(parts).item() == (0 + 1 + 2 + 2.5) / 4


@pytest.mark.parametrize("secagg", ["none", "full"])
def test_the_update_is_as_it_is_where_only_work_is_protected(secagg):
    """The update is the weighted mean without clip or noise; `work` alone is clipped and gets the noise."""
    options = (*CLIENT[:1], CLIENT[2], WORK, f"secagg={secagg}", "dp.clip=0.5")
    values, weights = {0: 100.0, 1: -28.0, 2: 8.0}, {0: 1.0, 1: 3.0, 2: 4.0}
    uploads = {
        id: {"strategy": {"v": torch.full((3,), value)}, "work": {"s": torch.full((SIZE,), value)}}
        for id, value in values.items()
    }
    protected = protection(*options, multiplier=2.0, method="fot")
    parts, total = summed(protected, info_of(range(3), expected=99.0), uploads, weights)
    assert torch.equal(parts["strategy"]["v"], torch.full((3,), (100.0 - 3 * 28.0 + 4 * 8.0) / 8))
    assert total.shortened == 3
    # each of the three is (+-1, ..., +-1) clip / sqrt(n) after the clip, in sum clip / sqrt(n)
    shares = 1 if secagg == "none" else math.sqrt(3 / 1)  # the quorum of 3 is 2, of which one may be the server's
    assert total.noise == pytest.approx(2.0 * 0.5 * shares)
    assert_deviation(parts["work"]["s"] - 0.5 / math.sqrt(SIZE), total.noise)

    quiet = {id: {"strategy": part["strategy"]} for id, part in uploads.items()}  # a round without `work`
    parts, total = summed(protected, info_of(range(3), expected=99.0), quiet, weights)
    assert torch.equal(only(parts), torch.full((3,), 6.0)) and total.shortened == 0


DIVISORS = [  # of 6 clients, one drops out before its upload and one after it: 5 have sent, 8 were expected
    (HIDDEN, True, 8),
    (CLIENT, False, 5),
    ((*CLIENT, "secagg=sum"), False, 5),
    (EXAMPLE, False, 5),  # cohorts are not secret at sample level
    ((*EXAMPLE, "secagg=sum"), False, 5),
]


@pytest.mark.parametrize(("options", "hidden", "divisor"), DIVISORS)
def test_a_mean_is_over_the_expected_clients_only_where_their_number_is_protected(options, hidden, divisor):
    uploads = {id: {"strategy": {"v": torch.ones(2)}, "counts": {"c": torch.ones(1)}} for id in range(6)}
    info = info_of(range(6), {1: "keys", 2: "unmask"}, expected=8.0, hidden=hidden)
    parts, _ = summed(protection(*options, "dp.clip=100"), info, uploads)
    assert torch.equal(parts["strategy"]["v"], torch.full((2,), 5 / divisor)) and parts["counts"]["c"].item() == 5.0


def test_the_divisor_of_a_weighted_mean_comes_out_of_the_sum():
    """The mean of 8, 4 and -4 with weights 1, 2 and 5 is (8 + 8 - 20) / 8."""
    uploads = {id: {"strategy": {"v": torch.tensor([value])}} for id, value in enumerate((8.0, 4.0, -4.0))}
    parts, _ = summed(protection("secagg=full"), info_of(range(3)), uploads, {0: 1.0, 1: 2.0, 2: 5.0})
    assert only(parts).item() == -0.5


# --- empty cohorts ---------------------------------------------------------------------------------------------------


def shown(protected, upload, expected=3.0):
    """Sum of an empty cohort, to which client 4 shows the shape of an upload."""
    total = protected.sum(info_of((), expected=expected, hidden=True), GATHERS)
    total.open()
    assert total.add(4, upload, 7.0)
    return total.close(), total


def test_an_empty_cohort_releases_pure_noise():
    """It does not depend on the upload that shows the shape: other values, even NaN, give the same release."""
    protected = protection(*HIDDEN, "dp.clip=2", multiplier=0.75)
    parts, total = shown(protected, constant((4,), value=9.0)[4])
    for value in (-1.0, math.nan, math.inf):
        other, _ = shown(protected, constant((4,), value=value)[4])
        assert torch.equal(only(parts), only(other))
    assert (total.noise, total.shortened, total.traffic()) == (1.5, 0, (0, 0))
    assert_deviation(3.0 * only(parts), 1.5)
    full, _ = summed(protected, info_of((0, 1), hidden=True), constant((0, 1)))
    assert torch.equal(only(parts), only(full))  # as in a round of uploads of zeros


@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_an_empty_cohort_has_no_update_where_only_work_is_protected(weights):
    """Without an update the step is zero, whatever the client that shows the shape holds."""
    upload = {"strategy": {"v": torch.full((3,), math.nan)}, "work": {"s": torch.ones(SIZE)}}
    options = (f"agg.weights={weights}", *HIDDEN[:1], *HIDDEN[2:], WORK, "strategy.participants=sampled")
    parts, total = shown(protection(*options, multiplier=1.5, method="fot"), upload)
    assert torch.equal(parts["strategy"]["v"], torch.zeros(3))
    assert total.noise == 1.5
    assert_deviation(parts["work"]["s"], 1.5)


@pytest.mark.parametrize("options", [(), ("secagg=sum",), CLIENT, EXAMPLE], ids="+".join)
def test_nobody_at_all_is_aborted(options):
    total = protection(*options).sum(info_of((0, 1, 2)), GATHERS)
    total.open()
    with pytest.raises(RoundAborted, match="no client of the cohort has answered"):
        total.close()


# --- what cannot be summed -------------------------------------------------------------------------------------------


def with_counter(value):
    return {"strategy": {"w": torch.full((2,), float(value)), COUNTER: torch.tensor(value)}}


@pytest.mark.parametrize("options", [("secagg=full",), EXAMPLE], ids="+".join)
def test_counters_of_normalisation_layers_stay_on_the_clients(options):
    assert COUNTER in MODEL.buffers(0)
    parts, _ = summed(protection(*options), info_of((0, 1)), {0: with_counter(3), 1: with_counter(5)})
    counter = parts["strategy"][COUNTER]
    assert (counter.dtype, counter.shape, counter.item()) == (torch.int64, (), 0)
    assert torch.equal(parts["strategy"]["w"], torch.full((2,), 4.0))


def test_the_part_that_a_node_sends_has_no_counters():
    """A counter tells how many batches a client has, though all else is masked."""
    total = protection("secagg=full").sum(info_of((0, 1)), GATHERS)
    assert total.add(0, with_counter(3), 1.0)
    assert total.part()["_outlines"]["strategy"][COUNTER].item() == 0


@pytest.mark.parametrize("options", [("secagg=sum",), ("secagg=full",), CLIENT, EXAMPLE], ids="+".join)
@pytest.mark.parametrize("leaf", [torch.arange(3), torch.tensor(True), torch.ones(2, dtype=torch.int8)])
def test_other_integers_are_refused_by_name(options, leaf):
    total = protection(*options).sum(info_of((0, 1)), GATHERS)
    total.open()
    with pytest.raises(UpdateError, match=rf"'work' sends 'labels' as {leaf.dtype}; .*floats only"):
        total.add(0, {"strategy": {"w": torch.ones(2)}, "work": {"labels": leaf}}, 1.0)


@pytest.mark.parametrize("bits", [16, 32])
def test_entries_beyond_the_range_are_clipped_and_counted(bits):
    """With 8 bits behind the point, each of two clients has (2^(bits-1) - 1) / 2 units, rounded down."""
    limit = ((2 ** (bits - 1) - 1) // 2) / 2**8
    options = ("agg.weights=uniform", "secagg=full", f"secure.bits={bits}", "secure.fraction_bits=8")
    uploads = {
        0: {"strategy": {"v": torch.tensor([1.5, limit, 2 * limit, -1e30], dtype=torch.float64)}},
        1: {"strategy": {"v": torch.tensor([0.5, limit, 3 * limit, -3 * limit], dtype=torch.float64)}},
    }
    parts, total = summed(protection(*options), info_of((0, 1)), uploads)
    assert total.clipped == 4
    assert only(parts).tolist() == [1.0, limit, limit, -limit]  # saturated, never wrapped
    uploads[0]["strategy"]["v"].clamp_(-limit, limit)
    uploads[1]["strategy"]["v"].clamp_(-limit, limit)
    assert summed(protection(*options), info_of((0, 1)), uploads)[1].clipped == 0


def test_noise_beyond_the_range_is_refused():
    """With ten clients and 8 of 16 bits behind the point, each may send up to 3276 / 256 = 12.8. One of the quorum of 5
    may collude, so 4 shares make up the noise: 1 + 6 sigma / 2 is 12.7 for sigma 3.9, and 13 for sigma 4."""
    options = (*CLIENT, "secagg=sum", "secure.bits=16", "secure.fraction_bits=8", "cohort=10", "partition.clients=10")
    parts, total = summed(protection(*options, multiplier=3.9), info_of(range(10)), constant(range(10)))
    assert total.clipped == 0
    assert_deviation(10 * only(parts), 3.9 * math.sqrt(10 / 4))
    message = "secure.bits=16 with secure.fraction_bits=8 limit entries to 12.8 in sums of 10 clients .* noise is 13; "
    with pytest.raises(ConfigError, match=message):
        protection(*options, multiplier=4.0)


def test_noise_has_to_fit_in_sums_of_all_clients_and_of_a_cohort():
    """Of 20 clients, 8 of a quorum of 10 are honest: 1 + 6 x 2.6 / sqrt(8) is above 1638 / 256. Of a quorum of 14 of 20
    that are drawn from 200, only one is sure to be honest: 0.1 + 6 x 0.1 x 175 is above 1638 / 16. The other sums, of a
    cohort of 10 and of all 200, have room."""
    options = (*CLIENT, "secagg=sum", "secure.bits=16")
    with pytest.raises(ConfigError, match=r"entries to 6.4 in sums of 20 clients .* noise is 6.52; "):
        protection(*options, "secure.fraction_bits=8", "partition.clients=20", "cohort=10", multiplier=2.6)
    options = (*options, "secure.fraction_bits=4", "partition.clients=200", "secure.quorum=0.7", "dp.clip=0.1")
    with pytest.raises(ConfigError, match=r"entries to 102 in sums of 20 clients .* noise is 105; "):
        protection(*options, "cohort=20", multiplier=175.0)


@pytest.mark.parametrize(
    ("options", "clients", "owners", "fault"),
    [
        (("secure.quorum=0.9",), 10, 64, "^$"),
        ((), 10, 64, "secure.quorum=0.5 lets 5 of 10 clients open a sum, and 7 may collude .* 0.8, or raise cohort$"),
        (
            ("secure.neighbours=4",),
            100,
            100,
            "secure.neighbours=4 is not safe in a cohort of 100 clients; the smallest number that is: ",
        ),
        # 16383 / 256 = 64 in sums of two, of whom one is honest: 1 + 6 x 10 fits; 12.8 in sums of ten
        (("secure.bits=16", "secure.fraction_bits=8"), 2, 2, "^$"),
        (("secure.bits=16", "secure.fraction_bits=8"), 10, 10, "limit entries to 12.8 in sums of 10 clients and cut"),
    ],
    ids=str,
)
def test_a_cohort_whose_sum_would_not_be_safe_is_aborted_before_anything_is_sent(options, clients, owners, fault):
    """A Poisson cohort can have a size that the checks before the run did not see."""
    protected = protection(*CLIENT, "secagg=full", "partition.clients=2", "cohort=2", *options, multiplier=10.0)
    total = protected.sum(info_of(range(clients), owners=owners), GATHERS)
    if fault == "^$":
        total.open()
        assert total.traffic()[0] > 0
    else:
        with pytest.raises(RoundAborted, match=fault):
            total.open()
        assert total.traffic() == (0, 0)


def test_shares_of_noise_allow_for_the_accomplices_that_a_sampled_cohort_may_have():
    """A tenth of 20 clients are two, and both may be in a cohort of 10: of the quorum of 5, three are honest."""
    protected = protection(*CLIENT, "secagg=sum", multiplier=1.5)
    for owners, shares in ((10, 4), (20, 3)):
        parts, total = summed(protected, info_of(range(10), owners=owners), constant(range(10)))
        assert total.noise == pytest.approx(1.5 * math.sqrt(10 / shares), rel=1e-12)
        assert_deviation(10 * only(parts), total.noise)


def test_each_clients_noise_of_samples_has_to_fit():
    """It is not divided into shares: 1 + 6 sigma is 12.4 for sigma 1.9, which fits into 12.8, and 13 for sigma 2."""
    options = (*EXAMPLE, "secagg=sum", "secure.bits=16", "secure.fraction_bits=8", "cohort=10", "partition.clients=10")
    assert protection(*options, multiplier=1.9).samples
    with pytest.raises(ConfigError, match="secure.bits=16 with secure.fraction_bits=8 limit entries to 12.8 .* 13; "):
        protection(*options, multiplier=2.0)


@pytest.mark.parametrize("options", [(), ("secagg=full",), EXAMPLE], ids="+".join)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("owner", ["strategy", "work"])
def test_uploads_that_are_not_finite_are_left_out(owner, value, options):
    if (owner, options) == ("work", EXAMPLE):
        pytest.skip("it counts as zero, see below")
    ids = range(4)
    uploads = constant(ids, owner, 0.25, size=3)
    total = protection(*options, "dp.clip=100").sum(info_of(ids, expected=3.0), GATHERS)
    total.open()
    bad = {owner: {"v": torch.tensor([0.0, value, 0.0], dtype=torch.float64)}}
    assert [total.add(id, bad if id == 1 else uploads[id], 1.0) for id in ids] == [True, False, True, True]
    expected = 0.25 if owner == "strategy" else 0.75
    assert torch.equal(only(total.close()), torch.full((3,), expected, dtype=torch.float64))


HERE, BROKEN = torch.full((3,), 0.25, dtype=torch.float64), torch.tensor([0.0, math.nan, 1.0], dtype=torch.float64)


@pytest.mark.parametrize("secagg", ["none", "sum", "full"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("owner", ["strategy", "work"])
def test_a_protected_client_that_is_not_finite_stays_in_the_sum_as_zeros(owner, value, secagg):
    """To leave it out would tell of its data by the divisor and by the noise. With the same draws of noise, the sum is
    to the bit that with an upload of zeros, of which no part is left: one broken entry is enough."""
    protected = protection(*CLIENT, f"secagg={secagg}", "dp.clip=100", multiplier=1.5)
    good = {name: {"v": HERE} for name in ("strategy", "work")}
    uploads, found = dict.fromkeys(range(4), good), {}
    zeros, broken = mapped(torch.zeros_like, good), {**good, owner: {"v": BROKEN.nan_to_num(value)}}
    for name, upload in (("zero", zeros), ("broken", broken)):
        found[name] = summed(protected, info_of(range(4)), {**uploads, 1: upload})
    (zero, plain), (parts, total) = found["zero"], found["broken"]
    assert same(zero, parts) and total.noise == plain.noise > 0
    assert total.zeroed == [1] and plain.zeroed == [] and (total.shortened, plain.shortened) == (1, 0)
    assert total.traffic() == plain.traffic()


def test_clients_that_count_as_zero_are_known_of_partial_sums_too():
    protected, info = protection(*CLIENT, "secagg=full", multiplier=1.0), info_of(range(4))
    whole = protected.sum(info, GATHERS)
    whole.open()
    for id in range(4):
        part = protected.sum(info, GATHERS)
        assert part.add(id, {"strategy": {"v": BROKEN if id % 2 else HERE}}, 1.0)
        whole.merge(part.part())
    assert whole.zeroed == [1, 3] and whole.shortened == 2
    assert bool(only(whole.close()).isfinite().all())


@pytest.mark.parametrize("secagg", ["none", "full"])
def test_where_only_work_is_protected_a_broken_update_leaves_its_client_out(secagg):
    """Nothing protects the update, nor who sent it. If `work` is broken, the update stays, with its weight."""
    protected = protection(*CLIENT[:1], CLIENT[2], WORK, f"secagg={secagg}", "dp.clip=100", method="fot")
    for broken, stays, update, work in (("strategy", False, 0.25, 0.75), ("work", True, 0.25, 0.75)):
        total = protected.sum(info_of(range(4)), GATHERS)
        total.open()
        for id in range(4):
            upload = {name: {"v": BROKEN if id == 1 and name == broken else HERE} for name in ("strategy", "work")}
            assert total.add(id, upload, 2.0) == (stays or id != 1)
        assert total.zeroed == [1] * stays
        means = total.close()
        assert torch.equal(means["strategy"]["v"], torch.full((3,), update, dtype=torch.float64))
        assert torch.equal(means["work"]["v"], torch.full((3,), work, dtype=torch.float64))


def test_broken_work_counts_as_zeros_at_example_level_too():
    """Its noise comes after the sum over samples, so to leave the client out would depend on data without noise."""
    total = protection(*EXAMPLE, "dp.clip=100", multiplier=1e-9).sum(info_of(range(4)), GATHERS)
    total.open()
    for id in range(4):
        assert total.add(id, {"strategy": {"v": HERE}, "work": {"v": HERE if id != 1 else BROKEN}}, 1.0)
    assert total.zeroed == [1]
    means = total.close()
    torch.testing.assert_close(means["strategy"]["v"], HERE)  # the update of the client stays
    torch.testing.assert_close(means["work"]["v"], 3 * HERE, rtol=0, atol=1e-5)


@pytest.mark.parametrize("options", [(), ("secagg=full",), CLIENT, EXAMPLE], ids="+".join)
@pytest.mark.parametrize(
    "other",
    [{"strategy": {"v": torch.ones(3)}}, {"strategy": {"u": torch.ones(2)}}, {"work": {"v": torch.ones(2)}}, {}],
)
def test_uploads_of_another_shape_are_refused(options, other):
    total = protection(*options).sum(info_of((0, 5)), GATHERS)
    total.open()
    assert total.add(0, {"strategy": {"v": torch.ones(2)}}, 1.0)
    with pytest.raises(
        UpdateError, match=r"client 5 sent '.*' .*(shape|not at all).* \(task 0, phase train, round 2\)"
    ):
        total.add(5, other, 1.0)


@pytest.mark.parametrize("options", [("secagg=full",), CLIENT, EXAMPLE], ids="+".join)
def test_what_clients_hold_is_not_written_to(options):
    ids = range(3)
    uploads = random_uploads(ids, scale=10.0)
    before = {id: mapped(torch.clone, parts) for id, parts in uploads.items()}
    summed(protection(*options, multiplier=1.0), info_of(ids), uploads)
    assert all(same(parts, uploads[id]) for id, parts in before.items())


def test_a_weight_beyond_the_range_is_refused_for_it_would_spoil_the_mean():
    """With two clients and 8 of 16 bits behind the point, each may send up to 16383 / 256 = 63.996."""
    options = ("secagg=sum", "secure.bits=16", "secure.fraction_bits=8", "agg.weights=samples")
    uploads = constant((0, 1), size=3)
    assert summed(protection(*options), info_of((0, 1)), uploads, {0: 63.0, 1: 1.0})[1].clipped == 0
    with pytest.raises(
        ConfigError, match=r"client 1 has weight 70, but secure\.bits=16 .* at most 64; .*agg\.weights=uniform"
    ):
        summed(protection(*options), info_of((0, 1)), uploads, {0: 1.0, 1: 70.0})


def test_a_clip_within_the_rounding_of_integers_is_refused():
    """Four entries, rounded to multiples of 2^-8, may change their norm by sqrt(4) 2^-9 = 0.0039."""
    for clip, refused in ((0.0039, True), (0.004, False)):
        total = protection("secagg=full", "secure.fraction_bits=8", *CLIENT, f"dp.clip={clip}").sum(
            info_of((0, 1)), GATHERS
        )
        total.open()
        upload = {"strategy": {"v": torch.ones(4)}}
        if refused:
            with pytest.raises(ConfigError, match="secure.fraction_bits=8 is too coarse: .* 4 entries by 0.00391"):
                total.add(0, upload, 1.0)
        else:
            assert total.add(0, upload, 1.0)
