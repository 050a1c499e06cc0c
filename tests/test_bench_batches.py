"""`hf-ssr bench --batch-size`: batches of prompts, against plain."""

import json

import pytest
import torch

from hf_ssr.bench.batches import Total, batches_of, table_of
from hf_ssr.command.cli import main
from hf_ssr.running.comparing import Run


def test_batches_are_padded_on_the_left():
    prompts = [torch.arange(1, n + 1)[None] for n in (2, 3, 1, 4, 2)]
    (first, mask), (second, _) = batches_of(prompts, 2, pad=9)  # the fifth is left out
    assert first.tolist() == [[9, 1, 2], [1, 2, 3]] and mask.tolist() == [[0, 1, 1], [1, 1, 1]]
    assert second.tolist() == [[9, 9, 9, 1], [1, 2, 3, 4]]


def test_counts_by_hand():
    plain, ours = Total(), Total()
    plain.add(Run([1], 11, 2.0, shapes=[(2, 5, 0.1)] + [(2, 1, 0.1)] * 10), True)
    ours.add(Run([1], 6, 1.0, shapes=[(2, 5, 0.1)] + [(2, 3, 0.1)] * 5), False)
    assert (plain.forwards, plain.places, ours.places, ours.same) == (11, 20, 30, 0)
    columns = [list(column.cells) for column in table_of({"t": {"2": {"plain": plain, "ssr": ours}}}).columns]
    assert [cells[1] for cells in columns] == ["t", "2", "1", "ssr", "0 of 1", "6", "1.83", "1.50", "1.0", "2.00"]


@pytest.mark.slow
def test_two_sizes(capfd):
    arguments = ["--batch-size", "2,3", "--limit", "3", "--max-new-tokens", "200", "--threads", "1", "--json"]
    assert main(["bench", *arguments]) == 0
    found = json.loads(capfd.readouterr().out.splitlines()[-1])["tasks"]["class"]
    for size in ("2", "3"):
        plain, off, ours = (found[size][method] for method in ("plain", "ssr_off", "ssr"))
        assert plain["batches"] == plain["same"] == off["same"] == ours["same"] == 1
        assert plain["forwards"] == 200 > ours["forwards"] >= off["forwards"]
        assert plain["places"] == 199 * int(size) < off["places"]
