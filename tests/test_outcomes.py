"""What the methods are for: on real digits FOT forgets less and ends better, by the figures of another implementation.

An independent implementation gave these means and standard deviations over six seeds with the preset's settings; ours
have to lie within two of its standard deviations. Six seeds of ours: cfl-run compare permuted-digits
--methods fedavg,fot --seeds 0..5 [--set partition.name=shards].
"""

import numpy as np
import pytest

import cfl

REFERENCE = {  # (partition, method): (mean ACC, its deviation), (mean FGT, its deviation), all fractions
    ("iid", "fedavg"): ((0.655, 0.047), (0.327, 0.063)),
    ("iid", "fot"): ((0.831, 0.016), (0.070, 0.008)),
    ("shards", "fedavg"): ((0.587, 0.054), (0.297, 0.063)),
    ("shards", "fot"): ((0.778, 0.016), (0.032, 0.013)),
}


@pytest.mark.slow
@pytest.mark.parametrize("partition, method", REFERENCE)
def test_permuted_digits_agrees_with_an_independent_implementation(partition: str, method: str) -> None:
    options = (f"partition.name={partition}", "engine=vmapped", "block=10")  # the fastest engine for these clients
    runs = [cfl.run(cfl.resolve("permuted-digits", method=method, seed=seed, overrides=options)) for seed in (0, 1)]
    for measure, (mean, deviation) in zip(("acc", "fgt"), REFERENCE[partition, method], strict=True):
        ours = np.mean([result.metrics[measure] for result in runs])
        assert abs(ours - mean) < 2 * deviation, f"{measure} is {ours:.3f}"
