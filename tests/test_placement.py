"""Which GPUs trainer and servers get, and what a server needs that lends its memory; no GPU is needed for it."""

import subprocess
import sys

import pytest
from ray.util.placement_group import remove_placement_group

from recipe.atropos.config.compose import load_config
from recipe.atropos.errors import ConfigurationError, LaunchError
from recipe.atropos.inference import memory_saver
from recipe.atropos.inference.memory_saver import check_saver, saver_variables
from recipe.atropos.inference.server import SGLangLaunch, sglang_command
from recipe.atropos.services.inference import plan_servers
from recipe.atropos.services.placement import place_servers
from recipe.atropos.services.run import Run

HEAD = "ray_kwargs.ray_init.address=head:6379"  # of a cluster, whose GPUs are elsewhere

# ---------------------------------------------------------------- how many GPUs


def placed(*overrides):
    config = load_config(["actor_rollout_ref.model.path=m", "inference.python=python", *overrides])
    return config, place_servers(config)


@pytest.mark.parametrize(
    ("gpus", "overrides", "colocated", "first"),
    [
        (1, [], True, [0]),
        (2, [], False, [1]),
        (8, ["trainer.n_gpus_per_node=8"], True, [0]),
        (8, ["trainer.n_gpus_per_node=4", "inference.servers=4"], False, [4, 5, 6, 7]),
        (8, ["trainer.n_gpus_per_node=4", "inference.servers=2", "inference.args.tp=2"], False, [4, 6]),
        (8, ["trainer.n_gpus_per_node=4", "inference.args.tensor-parallel-size=4"], False, [4]),
        (8, ["trainer.n_gpus_per_node=8", "inference.servers=2", "inference.args.tp_size=4"], True, [0, 4]),
        (4, ["trainer.n_gpus_per_node=2", "inference.colocated=true"], True, [0]),
        (4, ["inference.args.base_gpu_id=3"], False, [3]),
        (
            2,
            ["ray_kwargs.ray_init.address=head:6379", "trainer.n_gpus_per_node=8", "inference.servers=2"],
            False,
            [0, 1],
        ),
    ],
)
def test_placement_gives_each_its_gpus_or_shares_them_where_they_are_too_few(
    machine,
    tmp_path,
    gpus,
    overrides,
    colocated,
    first,
):
    machine(gpus)
    config, told = placed(*overrides)
    assert config.inference.colocated is colocated
    assert (told is not None) == (colocated and "inference.colocated=true" not in overrides)
    launches = plan_servers(Run(config, [], tmp_path)).values()
    assert [launch.extra_args["base_gpu_id"] for launch in launches] == first
    assert all(launch.lends_memory is colocated for launch in launches)
    assert {launch.mem_fraction_static for launch in launches} == {0.4 if colocated else None}


@pytest.mark.parametrize(
    ("gpus", "overrides", "needed"),
    [
        (1, ["inference.colocated=false"], 2),
        (2, ["trainer.n_gpus_per_node=4"], 4),
        (2, ["inference.args.tp-size=4"], 4),
        (4, ["inference.args.base_gpu_id=3", "inference.args.tp=2"], 5),
        (0, ["trainer.device=cuda"], 1),
    ],
)
def test_placement_that_needs_more_gpus_is_refused(machine, gpus, overrides, needed):
    machine(gpus)
    with pytest.raises(
        ConfigurationError, match=f"need {needed} GPUs .*and this machine has {gpus} .*trainer.device=cpu"
    ):
        placed(*overrides)


@pytest.mark.parametrize("overrides", [["trainer.device=cpu"], ["preset=demo", "trainer.n_gpus_per_node=2"]])
def test_placement_on_a_cpu_asks_for_no_gpu(machine, overrides):
    machine(1)
    config, told = placed(*overrides)
    assert config.inference.colocated is False and told is None


@pytest.mark.parametrize("first", ["tp", "tensor-parallel-size", "tp-size"])
def test_placement_flags_of_one_meaning_are_taken_once(first):
    launch = SGLangLaunch("m", python="p", port=1, device="cuda", extra_args={first: 2})
    assert launch.gpus == 2 and sglang_command(launch)[0][-2:] == ["--tp-size", "2"]
    with pytest.raises(LaunchError, match="inference.args gives tp_size twice, once as tp_size"):
        SGLangLaunch("m", extra_args={first: 2, "tp_size": 2})
    with pytest.raises(LaunchError, match="set inference.model_path itself"):
        SGLangLaunch("m", extra_args={"model": "n"})


def test_placement_gives_both_sides_the_same_nccl(monkeypatch):
    """NCCL joins no two processes that differ in these; SGLang sets them where they are unset, verl does not."""
    from recipe.atropos.device import platform_variables

    config = load_config(["actor_rollout_ref.model.path=m", "trainer.device=cuda"])
    names = ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE")
    for value in (None, "1"):
        if value:
            monkeypatch.setenv(names[0], value)
        server = sglang_command(SGLangLaunch("m", python="p", port=1, device="cuda"))[1]
        trainer = platform_variables(config)
        assert [server[name] for name in names] == [trainer[name] for name in names] == [value or "0", "0"]


@pytest.mark.e2e
def test_placement_of_ranks_is_not_waited_for_without_a_limit(cluster, monkeypatch):
    """Nine of four CPUs: refused by their number; where Ray alone could tell, after the limit."""
    from recipe.atropos.resource_pool import DevicePoolManager

    manager = DevicePoolManager({"wide": [9]}, {}, timeout=1.0)
    with pytest.raises(ConfigurationError, match="= 9 ranks, but Ray has [0-4] CPUs free; lower them or raise"):
        manager.create_resource_pool()
    monkeypatch.setattr(manager, "_check_resource_available", lambda: None)
    with pytest.raises(ConfigurationError, match="n_gpus_per_node=9: Ray found no room .* within 1 s; each takes"):
        manager.create_resource_pool()
    narrow = DevicePoolManager({"narrow": [1]}, {}, timeout=60.0)
    narrow.create_resource_pool()
    [group] = narrow.resource_pool_dict["narrow"].get_placement_groups()
    assert group.bundle_specs == [{"CPU": 1.0}]
    remove_placement_group(group)


# ---------------------------------------------------------------- memory that is lent


@pytest.fixture
def interpreter(tmp_path):
    """One whose packages are those of a CUDA build, of a CUDA that no machine has, and a library that needs it."""
    folder = tmp_path / "sglang"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    [packages] = folder.glob("lib/python3*/site-packages")
    for path, text in {
        "torch/__init__.py": "",
        "torch/version.py": "cuda = '99.0'\n",
        "torch_memory_saver-0.0.10.dist-info/METADATA": "Name: torch_memory_saver\nVersion: 0.0.10\n",
        "nvidia/cu99/lib/runtime.c": "int cudaRuntime(void) { return 13; }\n",
        "saver.c": "int cudaRuntime(void); int saver(void) { return cudaRuntime(); }\n",
    }.items():
        (packages / path).parent.mkdir(parents=True, exist_ok=True)
        (packages / path).write_text(text)
    runtime = packages / "nvidia/cu99/lib"
    shared = ["gcc", "-shared", "-fPIC"]
    subprocess.run([*shared, "-Wl,-soname,libcudart.so.99", "-o", runtime / "libcudart.so.99", runtime / "runtime.c"])
    library = packages / "torch_memory_saver_hook_mode_preload_cu99.abi3.so"
    subprocess.run([*shared, "-o", library, packages / "saver.c", runtime / "libcudart.so.99"], check=True)
    memory_saver._packages.cache_clear()
    memory_saver.saver_variables.cache_clear()
    yield str(folder / "bin/python"), library, runtime
    memory_saver._packages.cache_clear()
    memory_saver.saver_variables.cache_clear()


def test_gpu_memory_is_lent_by_a_library_that_finds_cudas_runtime(interpreter, monkeypatch):
    python, library, runtime = interpreter
    alone = subprocess.run([python, "-c", ""], env={"LD_PRELOAD": str(library)}, capture_output=True)
    assert alone.returncode == 127, "the loader does not look where pip puts CUDA's runtime"
    check_saver(python)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/own")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:64")
    saver_variables.cache_clear()
    expected = {"LD_LIBRARY_PATH": f"{runtime}:/own", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    assert saver_variables(python) == expected
    lending = SGLangLaunch("m", python=python, port=1, device="cuda", extra_args={"enable_memory_saver": True})
    assert expected.items() <= sglang_command(lending)[1].items()
    assert "LD_LIBRARY_PATH" not in sglang_command(SGLangLaunch("m", python=python, port=1, device="cuda"))[1]


def test_gpu_memory_that_cannot_be_lent_is_told_before_the_start(interpreter):
    python, library, runtime = interpreter
    (runtime / "libcudart.so.99").rename(runtime / "moved")
    with pytest.raises(
        LaunchError, match=r"does not start with .*_cu99.* libcudart.so.99: .*install nvidia-cuda-runtime"
    ):
        check_saver(python)
    library.unlink()
    with pytest.raises(LaunchError, match=r"has no library for CUDA 99.0"):
        check_saver(python)
    (library.parent / "torch/version.py").write_text("cuda = None\n")
    with pytest.raises(LaunchError, match="has torch for a CPU"):
        check_saver(python)
    (library.parent / "torch_memory_saver-0.0.10.dist-info/METADATA").unlink()
    with pytest.raises(LaunchError, match="has no package torch_memory_saver: .*pip install torch-memory-saver"):
        check_saver(python)
    with pytest.raises(LaunchError, match="inference.python=/nope/python does not run"):
        check_saver("/nope/python")
