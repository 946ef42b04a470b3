"""The seeds' claims beside the model: those with settings get a ratio, the others the settings that make them true."""

import pytest
from benchmarks.planner.claims import claims, exchange_ratio, layer_ratio, model_ratio, solved
from benchmarks.planner.tables import claims_text


@pytest.fixture(scope="module")
def found():
    return claims()


def test_every_claim_has_a_ratio_or_settings(found):
    claimed = {claim.claimed for claim in found}
    assert {"Tutel", "DeepSpeed-MoE"} <= {claim.name.split(",")[0].split()[0] for claim in found}
    assert claimed >= {
        7.3,
        4.5,
        9.0,
        5.0,
        4.96,
        5.75,
        8.49,
        2.75,
        2.31,
        1.40,
        20.7,
        1.74,
        2.0,
        2.56,
        5.93,
        1.55,
        2.11,
    }
    text = claims_text()
    for claim in found:
        assert claim.assumed and claim.name in text
        assert claim.found is None or claim.found > (1 if "Tutel" in claim.name else 0.5)


def test_settings_that_are_named_make_the_claim():
    tokens = solved(lambda t: exchange_ratio(t, 512), 5.93, 1, 2**20)
    assert exchange_ratio(tokens, 512) == pytest.approx(5.93, rel=1e-3)
    assert solved(lambda t: t, 7, 1, 5) is None
    assert solved(lambda t: 1 / t, 0.25, 1, 64) == pytest.approx(4)


def test_one_hot_dispatch_grows_with_the_tokens():
    few, many = (
        layer_ratio(tokens, gpus=16, dim=2048, hidden_dim=2048, per_gpu=2, top_k=2) for tokens in (2048, 16384)
    )
    assert 1 < few < many
    assert model_ratio(8, 12) < model_ratio(8, 24)


def test_claims_with_settings_are_of_the_right_size(found):
    for claim in found:
        known = "Tutel" in claim.name or "training" in claim.name
        if claim.found is not None and known and "half" not in claim.name:
            assert abs(claim.found / claim.claimed - 1) < 0.5, claim
