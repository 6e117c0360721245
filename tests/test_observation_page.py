"""The page on the observation has a row for each feature, in the order of the vector."""

import re
from pathlib import Path

from esper_soa.env.observation import ENV_FEATURES, SLOT_FEATURES

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "observation.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| (`.*?`) \|", re.MULTILINE)


def test_the_page_names_each_feature_once_in_the_order_of_the_vector() -> None:
    cells = ROW.findall(PAGE)
    names = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert names == [*ENV_FEATURES, *SLOT_FEATURES]


def test_the_page_has_the_numbers_of_features() -> None:
    words = f"{len(ENV_FEATURES)} features of the env, followed by {len(SLOT_FEATURES)} features"
    assert words in " ".join(PAGE.split())
