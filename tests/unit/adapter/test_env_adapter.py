"""Any environment by its name or file, and a command line of which every flag counts."""

import inspect
import itertools
import json
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import wandb
import yaml
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig
from openai.types.chat import ChatCompletionMessage

from helpers.adapter_cli import run_adapter
from recipe.atropos.adapter.adapted_env import AdaptedEnv, adapt
from recipe.atropos.adapter.defaults import WrongKey, complete
from recipe.atropos.adapter.flags import (
    CommandLine,
    UsageError,
    check_flags,
    join_negative_values,
    take_flag,
    take_settings,
)
from recipe.atropos.adapter.lifecycle import Lifecycle
from recipe.atropos.adapter.loading import EnvironmentTargetError, load_environment
from recipe.atropos.adapter.posting import PostingEnv, check_sizes
from recipe.atropos.adapter.validate import check_limits, validated
from recipe.atropos.data.reasons import RefusedGroup
from recipe.atropos.errors import EnvironmentFailure
from recipe.atropos.run import reporting
from recipe.atropos.run.reporting import EnvReport

SAID = "helpers.environments.said_env:SaidEnv"
WHOLE = """
    async def get_next_item(self): ...
    async def evaluate(self, *args, **kwargs): ...
"""


@pytest.fixture
def run(model_path, tmp_path):
    """(exit status, output) of the adapter's command with these flags, of ``SaidEnv`` by default."""

    def run(*flags, command="serve", env=SAID, **variables):
        return run_adapter(tmp_path, command, "--env", env, *flags, MODEL=str(model_path), **variables)

    return run


# ---------------------------------------------------------------------- targets


def write(folder, **files):
    """``a__b="..."`` is a/b.py."""
    for name, text in files.items():
        path = folder.joinpath(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("from atroposlib.envs.base import BaseEnv\n" + text)
    return folder


@pytest.fixture
def restored_imports():
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


pytestmark = pytest.mark.usefixtures("restored_imports")


def test_a_file_is_imported_as_a_script_is_with_its_folder_first(tmp_path):
    write(
        tmp_path,
        beside_it="NAME = 'beside'",
        env_a=f"import beside_it\nclass A(BaseEnv):\n    name = beside_it.NAME{WHOLE}",
    )
    environment = load_environment(str(tmp_path / "env_a.py"))
    assert environment.name == "beside"
    assert load_environment(f"{tmp_path / 'env_a.py'}:A") is environment, "one file is one module"


@pytest.mark.parametrize("with_init", [True, False])
def test_target_with_relative_imports_is_part_of_its_package(tmp_path, with_init):
    uses = f"from .inner.values import NAME\nclass A(BaseEnv):\n    name = NAME{WHOLE}"
    write(tmp_path, **{"outer__pack-age__env_b": uses, "outer__pack-age__inner__values": "from ..more import NAME"})
    write(tmp_path, **{"outer__pack-age__more": "NAME = 'inner'"})
    if with_init:
        write(tmp_path, **{"outer____init__": "", "outer__pack-age____init__": ""})
        (tmp_path / "outer" / "__init__.py").write_text("")
        (tmp_path / "outer" / "pack-age" / "__init__.py").write_text("")
    assert load_environment(str(tmp_path / "outer" / "pack-age" / "env_b.py")).name == "inner"


def test_a_file_may_name_the_folders_that_it_lies_in(tmp_path):
    write(tmp_path, made_up_envs__base_env=f"class A(BaseEnv):\n    name = 'a'{WHOLE}")
    write(tmp_path, made_up_envs__more__env_c="from made_up_envs.base_env import A\nclass B(A): pass")
    environment = load_environment(str(tmp_path / "made_up_envs" / "more" / "env_c.py"))
    assert environment.__name__ == "B" and environment.name == "a", "an imported environment is not meant"


def test_target_of_a_base_and_one_environment_is_the_environment(tmp_path):
    helper = "class Helper(BaseEnv):\n    async def evaluate(self): ...\n"
    write(tmp_path, env_d=f"{helper}class Real(Helper):{WHOLE}")
    assert load_environment(str(tmp_path / "env_d.py")).__name__ == "Real"
    with pytest.raises(EnvironmentTargetError, match="Helper is no whole environment: it lacks get_next_item"):
        load_environment(str(tmp_path / "env_d.py:Helper"))


@pytest.mark.parametrize(
    ("text", "target", "expected"),
    [
        (f"class A(BaseEnv):{WHOLE}\nclass B(A): pass", "env.py", "give .*env.py:CLASS; .* defines: A, B"),
        ("", "env.py", "give .*env.py:CLASS; none of its own classes derives from BaseEnv"),
        (f"class A(BaseEnv):{WHOLE.replace('evaluate', 'evaluated')}", "env.py", "A is no whole .*: it lacks evaluate"),
        ("KEY = {}['judge']", "env.py", r"env.py cannot be imported: KeyError: 'judge' \(line 2\)"),
        ("import no_such_thing", "env.py", "cannot be imported: ModuleNotFoundError: No module named 'no_such_thing'"),
        ("class A: pass", "env.py:A", "has no class A that derives from BaseEnv"),
        ("", "nothing.py", "nothing.py: no such file"),
        ("", "no.such.module:A", "no module no; put its folder on PYTHONPATH"),
    ],
)
def test_a_target_that_names_no_environment_is_refused(tmp_path, text, target, expected):
    write(tmp_path, env=text)
    with pytest.raises(EnvironmentTargetError, match=expected):
        load_environment(str(tmp_path / target) if ".py" in target else target)


def test_adapting_twice_is_adapting_once():
    """What an environment overrides stays in force."""

    class Env(BaseEnv):
        async def get_next_item(self): ...
        async def evaluate(self): ...
        async def handle_send_to_api(self, *args, **kwargs):
            return "its own"

    adapted = adapt(Env)
    assert adapt(adapted) is adapted and issubclass(adapted, Env) and adapted.__name__ == "Env"
    order = [cls.__name__ for cls in adapted.__mro__]
    assert order.index("AdaptedEnv") < order.index("Env", 1) < order.index("PostingEnv") < order.index("BaseEnv")


FRONT, BEHIND = (AdaptedEnv, CommandLine, Lifecycle), (PostingEnv,)


def test_adapted_env_overrides_each_method_once_on_a_side():
    names = {name for name, _ in inspect.getmembers(BaseEnv, callable) if not name.startswith("__")}
    for side in (FRONT, BEHIND):
        overridden = [name for cls in side for name in vars(cls) if name in names]
        assert overridden and len(overridden) == len(set(overridden)), sorted(overridden)


def test_adapted_env_takes_no_public_name():
    """But for the documented ``report``, and what the adapter is configured by."""
    known = {"adapter_settings", "reward_bridge", "report", "owns_process", "only_checked"}
    known |= {"api_timeout", "trainer_timeout", "retry_seconds", "longest_wait"}
    own = {name for cls in (*FRONT, *BEHIND) for name in vars(cls) if not name.startswith("_")}
    assert own - known <= set(dir(BaseEnv)), own - known - set(dir(BaseEnv))


def test_target_that_cannot_be_run_ends_with_one_line(tmp_path):
    """It says why."""
    write(tmp_path, env_e="import sys\nsys.exit('needs a key')")
    status, output = run_adapter(tmp_path, "serve", "--env=env_e.py")
    assert status == 2 and "env_e.py cannot be imported: SystemExit: needs a key" in output.splitlines()[-1]


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ("None", "Own.config_init() returns None; return a configuration and a list of servers"),
        ("BaseEnvConfig(), None", "Own.config_init() returns ['BaseEnvConfig', 'NoneType']; return a configuration"),
        ("Needy(), []", "Needy: path needs a default in the class, or a value in config_init(): Field required"),
    ],
)
def test_defaults_that_are_none_end_with_what_to_return(tmp_path, returned, expected):
    own = f"class Own(BaseEnv):{WHOLE}    @classmethod\n    def config_init(cls): return {returned}\n"
    imports = "from atroposlib.envs.base import BaseEnvConfig\nclass Needy(BaseEnvConfig):\n    path: str\n"
    write(tmp_path, env_f=imports + own)
    status, output = run_adapter(tmp_path, "serve", "--check", "--env=env_f.py")
    assert status in (1, 2) and expected in output.splitlines()[-1], output


# ---------------------------------------------------------------------- flags


def said(output):
    (line,) = [line for line in output.splitlines() if line.startswith("SAID ")]
    return json.loads(line.removeprefix("SAID "))


FLAGS = ["--openai.base_url=http://given:9/v1", "--openai.server_type", "sglang", "--openai.api_key", "k"]


@pytest.mark.parametrize(
    ("command", "servers"),
    [*(("serve", form) for form in ("one", "list", "two", "baseline")), ("evaluate", "two"), ("process", "two")],
)
def test_openai_flags_win_in_every_form_of_configuration(run, command, servers):
    status, output = run("--env.use_wandb=false", *FLAGS, command=command, SERVERS=servers)
    assert status == 0, output
    (server,) = said(output)["servers"]
    assert (server["base_url"], server["server_type"], server["api_key"]) == ("http://given:9/v1", "sglang", "k")
    assert server["timeout"] == 77, "what no flag names stays"
    assert not server["health_check"] and said(output)["kind"] == "SGLangServer"


@pytest.mark.parametrize("use_wandb", [True, False])
def test_no_login_to_wandb_is_needed_to_process(monkeypatch, tmp_path, use_wandb):
    """atroposlib turns it on there, whatever the environment's default is."""
    for name in ("WANDB_CONFIG_DIR", "NETRC"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "")
    server = APIServerConfig(base_url="http://127.0.0.1:1/v1", server_type="sglang")
    complete(BaseEnvConfig(use_wandb=use_wandb), [server], {}, {}, serves=False)
    with wandb.init(project="nobody") as tracked:
        assert tracked.disabled, "W&B has read the environment again"


def test_promises_adapter_completes_what_the_command_line_leaves(run):
    """And only there: in code, ``config_init`` gives the environment's own defaults."""
    url = "http://127.0.0.1:1/v1"
    status, output = run(f"--openai.base_url={url}", ATROPOS_API_KEY="the-key-of-the-run")
    assert status == 0 and '"kind": "SGLangServer"' in output and "the-key" not in output, output
    assert f"adapter: {url} is assumed to be an SGLang server (--openai.server_type=sglang)" in output
    assert '"api_key": "***"' in output, "the run's, hidden"
    assert said(output)["config"]["total_steps"] == 10**9, "BaseEnv would end after 1,000"
    status, output = run(f"--openai.base_url={url}", "--env.total_steps=7")
    assert said(output)["config"]["total_steps"] == 7
    _, [server] = adapt(load_environment("recipe.atropos.environments.gsm8k")).config_init()
    assert server.api_key == "x"


def test_an_environment_without_a_server_is_told_what_to_give():
    with pytest.raises(WrongKey, match="give --openai.base_url=http://HOST:PORT/v1"):
        complete(BaseEnvConfig(use_wandb=False), [APIServerConfig(base_url=None)], {}, {})


def test_secret_is_hidden_by_environments(run, tmp_path):
    """BaseEnv prints its servers, and writes them to a file that everyone may read."""
    secret = json.dumps(["--openai.api_key=the-key-of-the-run"])
    flags = {"command": "evaluate", "SERVERS": "two", "ATROPOS_SECRET_FLAGS": secret}
    status, output = run("--env.data_dir_to_save_evals=evals", **flags)
    assert status == 0 and "the-key" not in output and '"api_key": "***"' in output, output
    written = tmp_path / "evals" / "evaluate_config.yaml"
    assert [server["api_key"] for server in yaml.safe_load(written.read_text())["openai"]] == ["***", "***"]
    assert written.stat().st_mode & 0o777 == 0o644, "and is a file as any other"


def test_a_flag_that_names_no_server_changes_each_of_several(run):
    for servers, urls in (("two", ["http://first:1/v1", "http://second:1/v1"]), ("baseline", None)):
        status, output = run("--openai.api_key", "k", SERVERS=servers)
        assert status == 0, output
        found = said(output)["servers"]
        assert [server["api_key"] for server in found] == ["k"] * len(found)
        assert [s["base_url"] for s in found] == (urls or [f"http://localhost:{p}/v1" for p in range(9004, 9008)])
    status, output = run("--openai.api_kee=k", SERVERS="two")
    assert status == 2 and "unknown flag --openai.api_kee; did you mean --openai.api_key?" in output


def test_servers_of_a_configuration_file_count(run, model_path, tmp_path):
    """Several of them take no flags."""

    def with_file(servers, *flags, namespace="openai", **variables):
        (tmp_path / "c.yaml").write_text(yaml.safe_dump({namespace: servers}))
        return run("--config=c.yaml", *flags, **variables)

    one, other = ({"model_name": str(model_path), "base_url": f"http://file{i}/v1", "api_key": "f"} for i in (0, 1))
    for form in ("one", "two", "baseline"):
        status, output = with_file(one, "--openai.api_key=k", SERVERS=form)
        assert status == 0, output
        assert [(s["base_url"], s["api_key"]) for s in said(output)["servers"]] == [("http://file0/v1", "k")]
    status, output = with_file([one, other])
    assert [server["base_url"] for server in said(output)["servers"]] == ["http://file0/v1", "http://file1/v1"]
    assert said(output)["config"]["total_steps"] == 10**9 and "sglang" not in output, "the environment's are filled in"
    status, output = with_file([one, other], "--openai.api_key=k")
    assert status == 2 and "not supported when multiple servers are defined" in output
    status, output = with_file({"model_nam": "m"})
    assert status == 2 and "--config=c.yaml: " in output and "did you mean --openai.model_name?" in output
    status, output = with_file({"grup_size": 4}, namespace="env")
    assert status == 2 and "did you mean --env.group_size?" in output
    status, output = run("--config=no.yaml")
    assert status == 2 and "--config=no.yaml: no such file" in output


def test_options_of_an_environments_own_count_in_its_file(run, tmp_path):
    """Many environments of Atropos return a configuration of their own, and leave ``env_config_cls`` as it is."""
    (tmp_path / "own_env.py").write_text(
        "from helpers.environments.said_env import SaidEnv\n"
        "from atroposlib.envs.base import BaseEnvConfig\n"
        "class OwnConfig(BaseEnvConfig):\n    boards: int = 1\n"
        "class OwnEnv(SaidEnv):\n    @classmethod\n    def config_init(cls):\n"
        "        config, servers = super().config_init()\n"
        "        return OwnConfig(**config.model_dump()), servers\n"
    )
    for name, status in (("boards", 0), ("bords", 2)):
        (tmp_path / "c.yaml").write_text(yaml.safe_dump({"env": {name: 3}}))
        found, output = run("--config=c.yaml", env="own_env.py")
        assert found == status, output
        assert said(output)["config"]["boards"] == 3 if name == "boards" else "mean --env.boards?" in output


def test_a_negative_number_may_follow_its_flag_after_a_space(run):
    flags = ["--env.total_steps", "-1", "--env.inference_weight", "-0.5", "--env.max_num_workers", "-1"]
    status, output = run(*flags)
    assert status == 0, output
    config = said(output)["config"]
    assert (config["total_steps"], config["inference_weight"], config["max_num_workers"]) == (-1, -0.5, -1)
    assert join_negative_values(["--a", "-1e3", "--b", "-x", "--c=1", "-2"]) == ["--a=-1e3", "--b", "-x", "--c=1", "-2"]


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("--env.grup_size=4", "unknown flag --env.grup_size; did you mean --env.group_size?"),
        ("--env.max_token_len=100", "unknown flag --env.max_token_len; did you mean --env.max_token_length?"),
        ("--openai.url=http://x", "unknown flag --openai.url; did you mean --openai.base_url?"),
        ("--env.group_size=four", "--env.group_size='four': Input should be a valid integer"),
        ("again", "unrecognized arguments: again"),
    ],
)
def test_a_flag_that_cannot_be_meant_is_an_error_that_names_it(run, flag, expected):
    status, output = run(flag)
    assert status == 2 and expected in output and "Traceback" not in output, output


@pytest.mark.parametrize("flag", ["--adapter.groups_in_flight=3", "--adapter.report=f"])
def test_settings_of_the_adapter_are_flags(flag):
    arguments = ["serve", flag, "--env.group_size=2"]
    settings = take_settings(arguments)
    assert settings.flags() == [flag] and arguments == ["serve", "--env.group_size=2"]
    assert take_settings(arguments) is None


@pytest.mark.parametrize("value", ["0", "2.5", "none"])
def test_a_setting_that_cannot_be_is_refused_by_name(value):
    with pytest.raises(UsageError, match=f"--adapter.groups_in_flight={value}: Input should be"):
        take_settings([f"--adapter.groups_in_flight={value}"])


def test_usage_and_help(tmp_path, model_path):
    for arguments, wanted, expected in (
        (["--help"], 0, "TARGET is MODULE, MODULE:Class, FILE.py or FILE.py:Class"),
        (["serve", "--env", SAID, "--help"], 0, "--env.group_size"),
        (["serve"], 2, "usage: "),
        (["serve", "--env"], 2, "--env needs a value"),
        (["--env", SAID], 2, "say what to do: serve, evaluate, process"),
    ):
        status, output = run_adapter(tmp_path, *arguments, MODEL=str(model_path))
        assert status == wanted and expected in output, (arguments, output)
    assert take_flag(["--env.a=1", "--env=2"], "--env") == "2" and take_flag(["--env.a", "1"], "--env") is None
    with pytest.raises(UsageError, match="unknown flag --zzz; see --help"):
        check_flags(["--zzz"], {"--env.a"})


@pytest.mark.parametrize("command", ["serve", "evaluate", "process"])
def test_dataset_that_is_missing_ends_with_one_line(run, command):
    status, output = run(command=command, FAIL="1")
    assert status == 1
    assert "error: FileNotFoundError: no dataset at /data/nowhere (in setup() of " in output.splitlines()[-1]


def test_a_failure_in_a_group_of_tasks_is_named(run, tmp_path):
    """As of a model without a chat template: the launcher shows the last line."""
    text = "import asyncio\nfrom helpers.environments.said_env import SaidEnv\nclass Grouped(SaidEnv):\n"
    text += "    async def evaluate(self):\n        async with asyncio.TaskGroup(): raise ValueError('why')\n"
    write(tmp_path, grouped=text)
    status, output = run(command="evaluate", env="grouped.py:Grouped")
    assert status != 0 and output.splitlines()[-1] == "error: ValueError: why"


# ---------------------------------------------------------------------- groups, sizes, silence


def group(**fields):
    whole = {"tokens": [[1, 2, 3], [1, 4]], "masks": [[-100, 2, 3], [-100, 4]], "scores": [1.0, 0.5]}
    return whole | {"inference_logprobs": [[1.0, -0.5, -0.25], [1.0, -0.5]], "group_overrides": None} | fields


def test_numbers_of_every_library_become_plain_ones():
    """They may stand anywhere in a group."""
    made = group(
        tokens=[np.array([1, 2, 3]), torch.tensor([1, 4])],
        masks=(np.array([-100, 2, 3], dtype=np.int32), [np.int64(-100), 4]),
        scores=np.array([1.0, 0.5], dtype=np.float32),
        inference_logprobs=[np.array([1.0, -0.5, -0.25], dtype=np.float16), torch.tensor([1.0, -0.5])],
        overrides=[{"a": np.bool_(True), 3: np.float32(0.5)}, {}],
        messages=[[ChatCompletionMessage(role="assistant", content="hi")]] * 2,
    )
    plain = validated(made)
    assert plain == group(overrides=[{"a": True, "3": 0.5}, {}], messages=plain["messages"], group_overrides={})
    assert json.loads(json.dumps(plain)) == plain and plain["messages"][1][0]["content"] == "hi"
    assert all(type(score) is float for score in plain["scores"])
    assert validated(group(scores=[torch.tensor(1.0), True]))["scores"] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("fields", "reason", "detail"),
    [
        ({"scores": [1.0, float("nan")]}, "nonfinite_scores", r"\[1.0, nan\]"),
        ({"scores": [np.float32("inf"), 1.0]}, "nonfinite_scores", "inf"),
        ({"scores": [None, 1.0]}, "nonfinite_scores", "None"),
        ({"masks": [[-100, 2, 3]]}, "unequal_lengths", "1 masks for 2 sequences"),
        ({"masks": [[-100] * 3, [-100] * 2]}, "no_trained_token", "all masks of 2 sequences"),
        (
            {"inference_logprobs": [[1.0] * 3, [1.0] * 3]},
            "unequal_lengths",
            r"logprobs\[1\] has length 3, tokens\[1\] has 2",
        ),
        ({"inference_logprobs": [[1.0] * 3, [1.0, float("nan")]]}, "malformed", r"\[1\] has no number at position 1"),
        ({"advantages": [1.0, -1.0]}, "malformed", r"advantages\[0\] is not a flat list of numbers: 1.0"),
        ({"advantages": [[1.0] * 3, None]}, "malformed", r"advantages\[1\] has no number at position 0"),
        ({"images": [object(), None]}, "malformed", "not JSON serializable: object"),
    ],
)
def test_a_group_that_cannot_be_sent_is_refused_by_name(fields, reason, detail):
    with pytest.raises(RefusedGroup, match=detail) as refused:
        check_limits(validated(group(**fields)), BaseEnvConfig(group_size=2, ensure_scores_are_not_same=False), 0)
    assert refused.value.reason == reason


def test_optional_fields_are_checked_after_tokens_are_restored():
    assert validated(group(inference_logprobs=[[1.0], []]))["inference_logprobs"] == [[1.0], []]


def test_what_is_no_group_is_refused_by_name():
    for made in ((group(), []), "text", 3):
        with pytest.raises(RefusedGroup, match="a group is a dict") as refused:
            validated(made)
        assert refused.value.reason == "malformed"


def test_sizes_that_cannot_be_packed_name_flag_and_fix():
    def check(group_size, max_token_length, batch_size, max_token_len):
        sizes = {"group_size": group_size, "max_token_length": max_token_length, "batch_size": batch_size}
        check_sizes(BaseEnvConfig(**sizes), max_token_len, "http://api:1")

    check(4, 100, 8, 100)
    check(3, 100, -1, -1)
    check(3, 100, 8, 100)
    with pytest.raises(EnvironmentFailure, match="--env.group_size=16: "):
        check(16, 100, 8, 100)
    with pytest.raises(EnvironmentFailure, match="--env.max_token_length=101 .* give --env.max_token_length=100"):
        check(4, 101, 8, 100)


def test_environment_that_sends_nothing_says_so_each_minute(monkeypatch, tmp_path, caplog):
    """The environment ends its items. Before each new one it pauses, longer and longer, until a group is sent."""
    now = itertools.count()
    monkeypatch.setattr(reporting, "time", SimpleNamespace(monotonic=lambda: float(next(now)), time=time.time))
    monkeypatch.setattr(reporting, "_LONGEST_PAUSE", 3.0)
    report = EnvReport("e", tmp_path / "report.jsonl")

    def pass_time():
        end = next(now) + reporting._SILENCE + 5
        while next(now) < end:
            report.poll(0)
        return report.counts["nothing_sent"]

    assert pass_time() == 0, "no item has ended"
    report.count("items", 3)
    report.refuse("equal_scores", "all 1.0")
    report.count("failed/ValueError", 2)
    assert pass_time() == 1
    assert report.pause == 1
    assert "nothing sent" in caplog.text and "failed/ValueError 2, not_sent/equal_scores 1" in caplog.text
    assert pass_time() == 1, "nothing more has ended"
    for number, pause in ((2, 2), (3, 3), (4, 3)):
        report.count("items")
        assert pass_time() == number and report.pause == pause
    assert report.counts["slowed_down"] == caplog.text.count("slowed down until a group is sent") == 1
    report.count("items")
    report.count("groups_sent")
    assert pass_time() == 4 and report.counts["nothing_sent"] == 4 and report.pause == 0
    assert json.loads((tmp_path / "report.jsonl").read_text().splitlines()[0])["counts"]["items"] == 3
