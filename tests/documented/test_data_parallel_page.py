"""The published page on DDP and FSDP: every way trains what one process trains."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch

from tests.documented import data_parallel_page as page
from tests.documented.hub import make_hub
from tests.parity.pool import pool

WAYS: list[Callable[[dict[str, str], str], page.Result]] = [
    page.train_with_ddp,
    page.train_with_ddp_around_parts,
    page.train_with_fsdp1,
    page.train_with_fsdp1_and_original_parameters,
    page.train_with_fsdp1_around_the_language_model,
    page.train_with_fsdp2,
    page.train_with_fsdp2_around_the_language_model,
]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_hub(tmp_path_factory.mktemp("hub"))


@pytest.fixture(scope="module")
def expected(hub: dict[str, str]) -> Callable[[str], page.Result]:
    return cache(lambda trained: page.train_with_one_process(hub, trained))


@pytest.mark.parametrize("trained", page.TRAINED)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_each_documented_setup_trains_like_one_process(
    hub: dict[str, str],
    expected: Callable[[str], page.Result],
    way: Callable[[dict[str, str], str], page.Result],
    trained: str,
) -> None:
    workers = pool()
    workers.renew()  # torch remembers meshes that equal those of an earlier job
    (losses, weights), _ = workers.run(2, way, hub, trained)
    wanted_losses, wanted = expected(trained)
    assert losses == pytest.approx(wanted_losses, rel=1e-5)
    assert weights.keys() == wanted.keys()
    for name, value in weights.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-5, msg=name)
