"""Every causal language model of the installed transformers: exact, or plain with a reason; none raises."""

import re

import pytest
import transformers
from every_model import PAGE, outcome_of, page
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

TYPES = {config_class.model_type: config_class for config_class in MODEL_FOR_CAUSAL_LM_MAPPING}
FEWEST_BUILT = 170  # of 196; the others need settings of their own, or are too big: docs/models.md says why


@pytest.mark.slow
@pytest.mark.parametrize("name", TYPES)
def test_exact_or_plain(name):
    outcome = outcome_of(TYPES[name])
    if outcome.unbuilt:
        pytest.skip(outcome.unbuilt)
    assert not outcome.wrong


@pytest.mark.slow
def test_most_types_are_built():
    assert sum(not outcome_of(config_class).unbuilt for config_class in TYPES.values()) >= FEWEST_BUILT


@pytest.mark.slow
def test_the_page_is_what_is_found():
    text = PAGE.read_text()
    version = re.search(r"in transformers (\S+),", text)[1]
    if version != transformers.__version__:
        pytest.skip(f"the page is of transformers {version}")
    assert text == page()


def test_the_page_names_every_type():
    text = PAGE.read_text()
    if f"in transformers {transformers.__version__}," in text:
        cells = [row.strip("| ").split(" | ")[-1] for row in text.splitlines() if row.startswith("| ")]
        assert TYPES.keys() <= {name for cell in cells for name in cell.split(", ")}
