"""The file of Atropos' own GSM8K environment and its data: what is missing is named before anything is started."""

import shutil

from helpers.adapter_cli import run_adapter
from helpers.gsm8k_checkout import MODULE, make_checkout, write_problems


def test_gsm8k_checkout_or_data_that_is_missing_is_named(tmp_path):
    checkout, data = make_checkout(tmp_path / "checkout"), write_problems(tmp_path / "data")
    (tmp_path / "half").mkdir()
    shutil.copy(data / "train.jsonl", tmp_path / "half")
    (tmp_path / "odd").mkdir()
    for split in ("train", "test"):
        (tmp_path / "odd" / f"{split}.jsonl").write_text('{"question": "?"}\n')
    for flags, expected in (
        ([], "no checkout of Atropos is on PYTHONPATH"),
        (["--atropos-dir", "/nowhere"], "--atropos-dir /nowhere: no checkout of Atropos"),
        (["--atropos-dir", str(checkout), "--data-dir=/nowhere"], "dataset '/nowhere': no /nowhere/train.jsonl"),
        (["--atropos-dir", str(checkout), "--data-dir", "half"], "half/test.jsonl"),
        (["--atropos-dir", str(checkout), "--data-dir", "odd"], "odd/train.jsonl line 1 has no text under 'answer'"),
    ):
        status, output = run_adapter(tmp_path, "serve", *flags, module=MODULE)
        assert status == 2 and expected in output and "Traceback" not in output, output
