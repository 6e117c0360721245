"""The panic rule against series of losses recorded from the reference."""

import torch

from esper_soa.config.env import GovernorConfig
from esper_soa.env.governor import PanicReason, check_panic
from esper_soa.state import Guard, initial
from tests.parity.parity_vectors import columns, load

MIN_SAMPLES = 10
REASONS = {
    "None": PanicReason.NONE,
    "governor_nan": PanicReason.NOT_FINITE,
    "governor_lobotomy": PanicReason.COLLAPSED_TO_CHANCE,
    "governor_divergence": PanicReason.DIVERGED,
}


def test_every_judgement_of_every_series_equals_the_recording() -> None:
    rows = load("governor")
    codes = torch.tensor([REASONS[name] for name in rows["reasons"].tolist()])
    params = columns(rows["params_columns"], rows["params"])
    for window in params["history_window"].unique().tolist():
        chosen = params["history_window"] == window
        loss = torch.from_numpy(rows["loss"])[chosen]
        expected = columns(rows["out_columns"], rows["out"])
        cfg = GovernorConfig(min_samples=MIN_SAMPLES)
        for name in ("sensitivity", "multiplier", "absolute_threshold"):
            setattr(cfg, name, params[name][chosen])
        cfg.min_panics = params["min_panics_before_rollback"][chosen]
        chance = params["random_guess_loss"][chosen]
        losses = torch.zeros(len(loss), int(window), dtype=torch.float64)
        guard = initial(Guard, (len(loss),), "cpu", losses=losses)
        for step in range(loss.shape[1]):
            guard, panic, reason = check_panic(guard, loss[:, step], chance, cfg)
            recorded = {name: values[chosen, step] for name, values in expected.items()}
            assert torch.equal(panic, recorded["panic returned"] == 1), step
            assert torch.equal(reason == PanicReason.DIVERGED, recorded["_pending_panic"] == 1), (
                step
            )
            assert torch.equal(guard.anomalies.double(), recorded["consecutive_panics"]), step
            assert torch.equal(guard.count.double(), recorded["len(loss_history)"]), step
            assert torch.equal(reason, codes[recorded["reason index"].long()]), step
