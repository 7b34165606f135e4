"""Flags of SGLang are checked against its own parser before a start; here against a table of a few of them."""

import pytest

from recipe.atropos.errors import LaunchError
from recipe.atropos.inference.server import SGLangLaunch, check_flags, wrong_flags
from recipe.atropos.utils.files import read_json, write_json

FLAGS = {
    "--tp-size": [None, "int", None],
    "--max-total-tokens": [None, "int", None],
    "--schedule-conservativeness": [None, "float", None],
    "--attention-backend": [None, None, ["torch_native", "fa3"]],
    "--disable-radix-cache": [0, None, None],
    "--cuda-graph-bs": ["+", "int", None],
    "--lora-paths": ["*", None, None],
}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"max_total_tokns": 3}, "max_total_tokns=3: SGLang 1 has no such flag; did you mean max_total_tokens?"),
        ({"no_such_flag": 1}, "no_such_flag=1: SGLang 1 has no such flag"),
        ({"tensor-parallel-size": "x"}, "tp_size=x: SGLang 1 takes a whole number"),
        ({"schedule_conservativeness": "x"}, "schedule_conservativeness=x: SGLang 1 takes a number"),
        ({"attention_backend": "foo"}, "attention_backend=foo: SGLang 1 takes one of torch_native, fa3"),
        ({"disable_radix_cache": 1}, "disable_radix_cache=1: this flag of SGLang 1 takes no value; give true or false"),
        ({"max_total_tokens": True}, "max_total_tokens=True: this flag of SGLang 1 takes a value"),
        ({"cuda_graph_bs": [1, "x"]}, "cuda_graph_bs=[1, 'x']: SGLang 1 takes a whole number"),
    ],
)
def test_flags_that_the_server_would_refuse_are_named(given, told):
    assert list(wrong_flags(given, FLAGS, "1")) == [f"inference.args.{told}"]


def test_flags_that_the_server_takes_pass():
    given = {"tp": 2, "attention-backend": "fa3", "disable_radix_cache": True, "lora_paths": True, "cuda_graph_bs": [1]}
    given |= {"max_total_tokens": None, "schedule": 1}  # one that is left out, and one that argparse completes
    assert not list(wrong_flags(given, FLAGS, "1"))


def test_flags_are_read_anew_before_one_is_refused(tmp_path, monkeypatch):
    """An SGLang that is installed for development has new flags under the same version."""
    python, cache = tmp_path / "python", tmp_path / "cache"
    python.write_text("""#!/bin/sh
case "$2" in
*ServerArgs*) echo a warning; echo '{"--new": [null, "int", null]}';;
*) echo '{"sglang": "1", "cuda": null, "Python.h": null}';;
esac
""")
    python.chmod(0o755)
    monkeypatch.setenv("ATROPOS_CACHE", str(cache))
    cache.mkdir()
    write_json(cache / "sglang-flags-1.json", FLAGS)
    launch = SGLangLaunch("m", python=str(python), port=1, device="cpu")
    check_flags(launch, {"tp_size": 1})
    assert read_json(cache / "sglang-flags-1.json") == FLAGS
    check_flags(launch, {"new": 1})
    assert read_json(cache / "sglang-flags-1.json") == {"--new": [None, "int", None]}
    with pytest.raises(LaunchError, match="^inference.args.tp_size=1: .* no such flag\ninference.args.x=1: .*flag$"):
        check_flags(launch, {"tp_size": 1, "x": 1})


def test_flags_of_parallelism_are_whole_numbers():
    with pytest.raises(LaunchError, match="inference.args.tp_size=x: give a whole number"):
        SGLangLaunch("m", extra_args={"tp": "x"})
