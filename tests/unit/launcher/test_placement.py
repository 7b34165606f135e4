"""Which GPUs trainer and servers get, and what a server needs that lends its memory; no GPU is needed for it."""

import asyncio
import contextlib
import subprocess
import sys
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from helpers.configs import loaded
from helpers.gpu import load_decided
from helpers.runs import run_of
from recipe.atropos.config.env_specs import environment_specs
from recipe.atropos.config.preflight import check_config
from recipe.atropos.errors import ConfigurationError, LaunchError
from recipe.atropos.inference.server import SGLangLaunch, check_saver, declares_flag, saver_variables, sglang_command
from recipe.atropos.launch_services import check_start
from recipe.atropos.launcher import launch, placement
from recipe.atropos.launcher.placement import check_environments_placement, place_servers
from recipe.atropos.launcher.sglang import InferenceServices, plan_servers
from recipe.atropos.main import fill_in, ray_options
from recipe.atropos.utils import hosts
from recipe.atropos.utils.gpus import platform_variables

GSM8K = "preset=gsm8k"
HEAD = "ray_kwargs.ray_init.address=head:6379"  # of a cluster, whose GPUs are elsewhere

# ---------------------------------------------------------------- how many GPUs


def placed(*overrides):
    config = load_decided("actor_rollout_ref.model.path=m", "inference.python=python", *overrides)
    return config, place_servers(config)


@pytest.mark.parametrize(
    ("gpus", "overrides", "colocated", "first"),
    [
        (1, [], True, [0]),
        (2, [], False, [1]),
        (8, ["trainer.n_gpus_per_node=8"], True, [0, 1, 2, 3, 4, 5, 6, 7]),
        (8, ["trainer.n_gpus_per_node=8", "inference.servers=1"], True, [0]),
        (8, ["trainer.n_gpus_per_node=8", "inference.args.tp_size=2"], True, [0, 2, 4, 6]),
        (4, ["trainer.n_gpus_per_node=4", "inference.args.tp_size=3"], True, [0]),
        (8, ["trainer.n_gpus_per_node=4", "inference.servers=4"], False, [4, 5, 6, 7]),
        (8, ["trainer.n_gpus_per_node=4", "inference.args.tensor-parallel-size=4"], False, [4]),
        (8, ["trainer.n_gpus_per_node=8", "inference.servers=2", "inference.args.tp_size=4"], True, [0, 4]),
        (4, ["trainer.n_gpus_per_node=2", "inference.colocated=true"], True, [0, 1]),
        (2, ["ray_kwargs.ray_init.address=auto"], False, [1]),  # a node of the cluster is here
        (2, ["ray_kwargs.ray_init.address=127.0.0.1:6379"], False, [1]),
        (4, ["inference.args.base-gpu-id=3"], False, [3]),
        (8, ["inference.args={tp: 4, dp: 4, enable_dp_attention: true}"], False, [1]),
        (2, [HEAD, "trainer.n_gpus_per_node=8", "inference.servers=2"], False, [0, 1]),
    ],
)
def test_placement_shares_gpus_where_they_are_too_few(machine, tmp_path, gpus, overrides, colocated, first):
    machine(gpus)
    config, told = placed(*overrides)
    assert config.inference.colocated is colocated
    assert (told is not None) == (colocated and "inference.colocated=true" not in overrides)
    assert told is None or f"shares them with {len(first)} server{'s'[: len(first) != 1]} (" in told
    launches = plan_servers(run_of(config, tmp_path)).values()
    assert [launch.extra_args["base_gpu_id"] for launch in launches] == first
    assert all(launch.releases_memory is colocated for launch in launches)
    assert {launch.mem_fraction_static for launch in launches} == {0.4 if colocated else None}


@pytest.mark.parametrize(
    ("flag", "gib", "overrides", "graphs"),
    [
        ("cuda_graph_max_bs_decode", 80, [GSM8K, "inference.servers=1"], 1024),
        ("cuda_graph_max_bs_decode", 80, [GSM8K, "inference.servers=2"], 512),
        ("cuda_graph_max_bs", 80, [GSM8K, "inference.servers=1"], 1024),  # SGLang 0.5.12's name
        ("cuda_graph_max_bs_decode", 80, [GSM8K, "inference.servers=1", "trainer.atropos.max_staleness=3"], 1024),
        ("cuda_graph_max_bs_decode", 80, [], None),  # 256, which SGLang captures by itself
        ("cuda_graph_max_bs_decode", 24, [GSM8K], None),
        ("cuda_graph_max_bs_decode", None, [GSM8K], None),
        ("cuda_graph_max_bs_decode", 80, [GSM8K, "inference.args.disable-cuda-graph=true"], None),
        ("cuda_graph_max_bs_decode", 80, [GSM8K, "inference.args.max_running_requests=64"], None),
        ("cuda_graph_max_bs_decode", 80, [GSM8K, "inference.args.cuda_graph_max_bs_decode=300"], 300),
    ],
)
def test_placement_captures_graphs_for_what_is_in_flight(machine, monkeypatch, tmp_path, flag, gib, overrides, graphs):
    machine(4)
    monkeypatch.setattr(placement, "gpu_memory", lambda: gib and gib << 30)
    sources = tmp_path / "sglang" / "srt"
    sources.mkdir(parents=True)
    (sources / "server_args.py").write_text(f"class ServerArgs:\n    tp_size: int = 1\n    {flag}: int | None = None\n")
    monkeypatch.setattr("recipe.atropos.inference.server.packages_of", lambda python: tmp_path)
    declares_flag.cache_clear()
    config, _ = placed(*overrides)
    [launch, *_] = plan_servers(run_of(config, tmp_path)).values()
    assert {name: value for name, value in launch.extra_args.items() if "graph_max" in name} == (
        {flag: graphs} if graphs else {}
    )
    declares_flag.cache_clear()


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
    told = f"need {needed} GPUs .*and this machine has {gpus} .*trainer.device=cpu"
    with pytest.raises(ConfigurationError, match=told):
        placed(*overrides)


@pytest.mark.parametrize("overrides", [["trainer.device=cpu"], ["preset=demo", "trainer.n_gpus_per_node=2"]])
def test_placement_on_a_cpu_asks_for_no_gpu(machine, overrides):
    machine(1)
    config, told = placed(*overrides)
    assert config.inference.colocated is False and told is None


def test_placement_follows_verls_own_variable(machine, monkeypatch, tmp_path):
    """It decides for the servers too, where trainer.device is auto."""
    machine(1)
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    config, told = placed()
    [launch] = plan_servers(run_of(config, tmp_path)).values()
    assert launch.device == "cpu" and told is None and "base_gpu_id" not in launch.extra_args
    monkeypatch.delenv("VERL_PLATFORM")
    config, _ = placed("trainer.device=cpu", "inference.device=cuda")
    [launch] = plan_servers(run_of(config, tmp_path)).values()
    assert launch.extra_args["base_gpu_id"] == 0, "the trainer has none of them"


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
    config = loaded("actor_rollout_ref.model.path=m", "trainer.device=cuda")
    names = ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE")
    for value in (None, "1"):
        if value:
            monkeypatch.setenv(names[0], value)
        server = sglang_command(SGLangLaunch("m", python="p", port=1, device="cuda"))[1]
        trainer = platform_variables(config)
        assert [server[name] for name in names] == [trainer[name] for name in names] == [value or "0", "0"]


def test_placement_gives_ray_its_gpus_and_its_workers_nccl(machine, monkeypatch):
    """Also workers of a cluster's other machines, which have not the driver's environment."""
    machine(8)
    for address, expected in ((None, {"num_gpus": 2}), ("host:6379", {"address": "host:6379"})):
        joins = [f"ray_kwargs.ray_init.address={address}"] * bool(address)
        config = loaded("actor_rollout_ref.model.path=m", "trainer.device=cuda", "trainer.n_gpus_per_node=2", *joins)
        for name, value in platform_variables(config).items():  # as the trainer does before
            monkeypatch.setenv(name, value)
        options = ray_options(config)
        variables = options["runtime_env"]["env_vars"]
        assert variables["VERL_PLATFORM"] == "nvidia"
        assert variables["NCCL_CUMEM_ENABLE"] == variables["NCCL_NVLS_ENABLE"] == "0"
        assert expected.items() <= options.items() and ("num_gpus" in options) == (address is None)


@pytest.mark.parametrize(("device", "megabytes"), [("cuda", 2048), ("cpu", 512)])
def test_placement_decides_the_buckets_of_a_push_by_device(device, megabytes):
    bucket = "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"
    for overrides, expected in (([], megabytes), ([f"{bucket}=100"], 100)):
        config = loaded("actor_rollout_ref.model.path=m", f"trainer.device={device}", *overrides)
        fill_in(config)
        assert OmegaConf.select(config, bucket) == expected and config.inference.colocated is False
        assert config.actor_rollout_ref.model.enable_gradient_checkpointing is True


def test_placement_flags_for_nccl_on_one_side_are_refused(monkeypatch):
    def check(*overrides):
        check_config(loaded("actor_rollout_ref.model.path=m", "trainer.device=cuda", *overrides))

    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    apart, flag = "inference.colocated=false", "inference.args.enable_symm_mem=true"
    with pytest.raises(ConfigurationError, match="enable_symm_mem changes NCCL .*: export NCCL_CUMEM_ENABLE=1 before"):
        check(apart, flag)
    check(apart, "inference.args.enable_nccl_nvls=true")
    check("inference.colocated=true", flag)
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")
    check(apart, flag)


# ---------------------------------------------------------------- memory that is lent


def test_gpu_memory_is_lent_by_a_library_that_finds_cuda(machine, model_path, monkeypatch, tmp_path):
    """Packages of a CUDA build, of a CUDA that no machine has; what is missing is told at once."""
    folder = tmp_path / "sglang"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    [packages] = folder.glob("lib/python3*/site-packages")
    for path, text in {
        "torch/__init__.py": "",
        "torch/version.py": "cuda = '99.0'\n",
        "torch_memory_saver-0.0.10.dist-info/METADATA": "Name: torch_memory_saver\nVersion: 0.0.10\n",
        "sglang-0.5.23.dist-info/METADATA": "Name: sglang\nVersion: 0.5.23\n",
        "nvidia/cu99/lib/runtime.c": "int cudaRuntime(void) { return 13; }\n",
        "saver.c": "int cudaRuntime(void); int saver(void) { return cudaRuntime(); }\n",
    }.items():
        (packages / path).parent.mkdir(parents=True, exist_ok=True)
        (packages / path).write_text(text)
    python, runtime = str(folder / "bin/python"), packages / "nvidia/cu99/lib"
    shared = ["gcc", "-shared", "-fPIC"]
    subprocess.run([*shared, "-Wl,-soname,libcudart.so.99", "-o", runtime / "libcudart.so.99", runtime / "runtime.c"])
    library = packages / "torch_memory_saver_hook_mode_preload_cu99.abi3.so"
    subprocess.run([*shared, "-o", library, packages / "saver.c", runtime / "libcudart.so.99"], check=True)
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
    assert sglang_command(lending)[1]["SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"] == "0", "else no room for a bucket"
    assert "LD_LIBRARY_PATH" not in sglang_command(SGLangLaunch("m", python=python, port=1, device="cuda"))[1]

    machine(1)
    (runtime / "libcudart.so.99").rename(runtime / "moved")
    with pytest.raises(LaunchError, match=r"does not start with .*_cu99.* libcudart.so.99: .*nvidia-cuda-runtime"):
        check_saver(python)
    library.unlink()
    with pytest.raises(LaunchError, match=r"has no library for CUDA 99.0"):
        check_saver(python)
    options = ["trainer.device=cuda", "inference.colocated=true", f"inference.python={python}"]
    config = loaded(f"actor_rollout_ref.model.path={model_path}", *options)
    with pytest.raises(LaunchError, match=r"has no library for CUDA 99.0"):
        check_start(run_of(config, tmp_path))
    (packages / "torch/version.py").write_text("cuda = None\n")
    with pytest.raises(LaunchError, match="has torch for a CPU"):
        check_saver(python)
    (packages / "torch_memory_saver-0.0.10.dist-info/METADATA").unlink()
    with pytest.raises(LaunchError, match="has no package torch_memory_saver: .*pip install torch-memory-saver"):
        check_saver(python)
    with pytest.raises(LaunchError, match="inference.python=/nope/python does not run"):
        check_saver("/nope/python")


BY_RAY = "inference.placement=ray"
HERE = ("trainer.nnodes=2", "inference.placement=launcher")


def test_placement_by_ray_takes_gpus_of_whole_nodes(machine, tmp_path):
    """Of several nodes unless told otherwise; SGLang sees the GPUs that Ray assigns, and no others."""
    machine(2)
    config, told = placed(HEAD, "trainer.nnodes=2", "inference.servers=3", "inference.args.tp_size=2")
    assert told == "Ray places 3 servers (inference.placement=ray)" and config.inference.colocated is False
    launches = plan_servers(run_of(config, tmp_path)).values()
    assert [launch.gpus for launch in launches] == [2, 2, 2]
    assert not any("base_gpu_id" in launch.extra_args for launch in launches)
    config, _ = placed(HEAD, *HERE, "trainer.n_gpus_per_node=1", "inference.args.base_gpu_id=0")
    assert config.inference.placement == "launcher"


@pytest.mark.parametrize(
    ("gpus", "overrides", "servers"),
    [
        (0, ["inference.servers=8", "inference.args.tp_size=2"], 8),
        (0, [], 1),
        (4, ["ray_kwargs.ray_init.address=auto", "trainer.n_gpus_per_node=8"], 1),  # whose ranks are elsewhere
        (8, ["inference.servers=8", "inference.args.tp_size=2"], 8),
        (8, ["inference.servers=4", "inference.args.tp_size=2"], None),
        (0, ["trainer.device=cpu"], None),
    ],
)
def test_placement_is_by_ray_where_this_machine_has_too_few_gpus(machine, gpus, overrides, servers):
    """And a cluster is joined, which may have them."""
    machine(gpus)
    config, told = placed(HEAD, *overrides)
    assert config.inference.placement == ("ray" if servers else "launcher")
    assert not servers or (config.inference.servers == servers and told.startswith(f"Ray places {servers} server"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([BY_RAY], "joins no Ray cluster; set ray_kwargs.ray_init.address"),
        ([BY_RAY, HEAD, "inference.colocated=true"], "Ray gives a GPU to one of the two"),
        ([BY_RAY, HEAD, "inference.args.nnodes=2"], "inference.args.nnodes=2 with .* all on one node"),
        ([BY_RAY, HEAD, "inference.args.base-gpu-id=1"], "inference.args.base_gpu_id=1 with"),
        ([BY_RAY, HEAD, "inference.port=30000"], "inference.port=30000 with"),
        ([HEAD, *HERE], "inference.placement=launcher with trainer.nnodes=2: .*inference.args.base_gpu_id"),
        ([HEAD, *HERE, "inference.colocated=true"], "inference.colocated=true with trainer.nnodes=2: Ray may give"),
    ],
)
def test_placement_by_ray_refuses_what_ray_decides(machine, overrides, message):
    machine(2)
    with pytest.raises(ConfigurationError, match=message):
        placed(*overrides)


ENVIRONMENT_BY_RAY = "environment.placement=ray"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "environment.placement=ray: the run joins no Ray cluster; set ray_kwargs.ray_init.address"),
        ([HEAD, "api.host=127.0.0.1"], "api.host=127.0.0.1 with environment.placement=ray: other nodes do not"),
        ([HEAD, "inference.host=0.0.0.0"], "inference.host=0.0.0.0 with"),
        ([HEAD, "environment.python=python3"], "other nodes do not prepare environment.python"),
        ([HEAD], None),
    ],
)
def test_placement_of_environments_is_refused_by_name(overrides, message):
    config = loaded(GSM8K, ENVIRONMENT_BY_RAY, *overrides)
    with pytest.raises(ConfigurationError, match=message) if message else contextlib.nullcontext():
        check_environments_placement(config, environment_specs(config).values())


@pytest.mark.parametrize(
    ("overrides", "placement"),
    [
        ([HEAD, "environment.replicas=8"], "ray"),
        ([HEAD], "launcher"),
        (["environment.replicas=8"], "launcher"),
        ([HEAD, "environment.replicas=8", "environment.placement=launcher"], "launcher"),
        ([HEAD, "environment.replicas=8", "environment.python=python3"], "launcher"),
        ([HEAD, "environment.replicas=8", "api.host=127.0.0.1"], "launcher"),
        ([HEAD, "environments={a: {target: m}, b: {target: m, replicas: 2}}"], "ray"),
    ],
)
def test_placement_of_replicas_is_by_ray_on_a_cluster(monkeypatch, overrides, placement):
    """With which the services listen where its nodes reach them: at this machine's address on the way to the head."""
    asked = []
    monkeypatch.setattr(hosts, "address_towards", lambda url: asked.append(url) or "10.0.0.1")
    config = loaded(GSM8K, *overrides)
    [*_, spec] = environment_specs(config).values()
    assert spec.placement == placement and asked == ["http://head:6379"] * (placement == "ray")
    assert {config.api.host, config.inference.host} == {"10.0.0.1" if asked else "127.0.0.1"}
    check_environments_placement(config, [spec])


@pytest.mark.parametrize("head", ["auto", "127.0.0.1:6379", "no.such.host.invalid:6379"])
def test_placement_on_the_head_itself_takes_its_default_route(monkeypatch, head):
    """As Ray does, whose head is at that address unless it is told another."""
    monkeypatch.setattr(hosts, "reachable_from_others", lambda host: f"for {host}")
    assert hosts.address_for_nodes(head) == "for 0.0.0.0"


@pytest.mark.parametrize("colocated", [True, False])
def test_gpu_memory_is_measured_before_the_trainer_takes_some(colocated, machine, tmp_path, monkeypatch):
    machine(2)
    order = []
    config = loaded("preset=demo", "trainer.device=cuda", f"inference.colocated={str(colocated).lower()}")

    async def planned(run):
        return InferenceServices(plan_servers(run), "http://127.0.0.1:9", "key")

    async def healthy(*_):
        order.append("servers healthy")

    async def version(*_):
        raise LaunchError("enough")

    monkeypatch.setattr(launch, "start_api", lambda run: SimpleNamespace(url="http://127.0.0.1:8"))
    monkeypatch.setattr(launch, "start_inference", planned)
    started = SimpleNamespace(log_path=tmp_path)
    monkeypatch.setattr(launch, "start_trainer", lambda *_: order.append("trainer") or started)
    monkeypatch.setattr(launch, "servers_healthy", healthy)
    monkeypatch.setattr(launch, "first_version", version)
    with pytest.raises(LaunchError, match="enough"):
        asyncio.run(launch.launch(run_of(config, tmp_path)))
    assert order == (["servers healthy", "trainer"] if colocated else ["trainer", "servers healthy"])
