"""Every environment of an Atropos checkout, stock and through our adapter:

    python benchmarks/environments.py --atropos-dir DIR

Each file that has a command line (``.cli()``) is started twice, offline, unmodified: as ``python FILE serve`` with
stock atroposlib, and through ``recipe.atropos.utils.env_adapter``. Both get the same flags, atroposlib's own Trajectory
API with a registered trainer, and a real SGLang server with a random policy whose tokenizer is trained on the
checkout's text. Measured is how far it gets within the time limit:

    import -> set up -> group       (a group of scored samples has arrived at the API)

and for a group whether each trained token has the logprob that it was sampled with. An environment that needs a package
that is not installed, a data set of the hub, a service or a key cannot run here; the table says what it needs. The
target: all environments that need none of these send groups through the adapter.
"""

import argparse
import asyncio
import json
import os
import re
import resource
import runpy
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

LIMIT = 60.0  # s, from the start of an environment to its first group
AT_ONCE = 4
GROUP_SIZE = 4
CONTEXT = 16384
_SHOWN = 160  # characters of an error
STAGES = ("import", "set up", "group")

# What an environment lacks here, by patterns in its log; the first match counts.
NEEDS = {
    "package": r"No module named '?([\w.]+)|cannot import name '(\w+)' from|ImportError: (.*)|(DeprecatedEnv)",
    "key": r"([A-Z_]*API_KEY[A-Z_]*)|api_key client option|Missing credentials|gated repo",
    "data set or model of the hub": r"OfflineModeIsEnabled|LocalEntryNotFound|Couldn't (?:reach|find).*?'([^']+)'"
    r"|offline mode|couldn't connect to|ConnectionError|not a local folder and is not a valid model",
    "network": r"Name or service not known|Temporary failure in name resolution|Max retries exceeded|getaddrinfo",
    "data of nltk": r"nltk\.download|LookupError",
    "configuration of its own": r"'BaseEnvConfig' object has no attribute '(\w+)'",
    "policy that is right now and then": r"group not sent, (?:no_group|equal_scores)",
    "file": r"FileNotFoundError: (.*)|No such file or directory: '([^']+)'",
    "service": r"(docker|\bmodal\b|\blean\b|\belan\b).{0,40}(?:not|fail|error|refuse)",
}


@dataclass
class Outcome:
    """How far one start got. ``why`` is what ended it; ``needs`` what it lacks here, if that is the cause."""

    reached: str = ""
    why: str = ""
    needs: str = ""
    sampled: float | None = None  # share of the trained tokens that came with a logprob
    seconds: float = 0.0

    @property
    def ran(self) -> bool:
        return self.reached == "group"


# --------------------------------------------------------------------- what all starts share


def make_policy(folder: Path, texts: list[Path]) -> None:
    """Make a random Qwen2, whose turns end after some 60 tokens, and an 8,192-token tokenizer trained on ``texts``."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from recipe.atropos.demo.small_policy import make_tokenizer

    tokenizer = make_tokenizer([path.read_text(errors="replace") for path in texts], vocabulary=8192)
    tokenizer.model_max_length = CONTEXT
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    width = 128
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2 * CONTEXT,  # some request answers of CONTEXT tokens
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = Qwen2ForCausalLM(config).to(torch.float32)
    with torch.no_grad():  # a direction shared by all states sets the end of turn's probability to about 1 in 60
        model.model.embed_tokens.weight[:, 0] = 10.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[2] = 0.0
        model.lm_head.weight[2, 0] = torch.log(torch.tensor(config.vocab_size / 60.0)) / width**0.5
    model.save_pretrained(folder)


def forked(action: Callable[[], Any], log: Path, folder: Path | None = None) -> int:
    """Fork a child that runs ``action`` as the leader of a session, with its output in ``log``; return its pid."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout, sys.stderr = os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
        if folder is not None:
            os.chdir(folder)
        action()
        status = 0
    except SystemExit as exit_:
        status = exit_.code if isinstance(exit_.code, int) else 1
        if isinstance(exit_.code, str):
            print(exit_.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def kill(pid: int) -> None:
    """Kill the child's whole session."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    while not ended(pid):
        time.sleep(0.01)


def serve_api(port: int) -> None:
    import uvicorn
    from atroposlib.api.server import app

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


# --------------------------------------------------------------------- one environment


def start_environment(file: Path, flags: list[str], ours: bool, marks: Path) -> None:
    """Run the environment's own command line, in a child. Only change: its progress is written to ``marks``."""
    from atroposlib.envs.base import BaseEnv

    def reached(what: str) -> None:
        with marks.open("a") as lines:
            lines.write(what + "\n")

    cli, register_env = BaseEnv.cli.__func__, BaseEnv.register_env

    def marked_cli(cls: type) -> None:
        reached("import")
        cli(cls)

    async def marked_register_env(self: BaseEnv) -> None:
        reached("set up")
        await register_env(self)
        get_next_item = self.get_next_item

        async def watched() -> Any:
            item = await get_next_item()
            if item is None:
                reached("no item")
            return item

        self.get_next_item = watched

    BaseEnv.cli = classmethod(marked_cli)
    BaseEnv.register_env = marked_register_env
    if ours:
        from recipe.atropos.utils import env_adapter

        sys.argv = ["env_adapter", "serve", "--env", str(file), *flags]
        env_adapter.main()
    else:
        sys.argv = [str(file), "serve", *flags]
        sys.path.insert(0, str(file.parent))
        runpy.run_path(str(file), run_name="__main__")


class Probe:
    """One start of one environment, polled until it has sent a group, has ended, or has run out of time."""

    def __init__(self, file: Path, checkout: Path, ours: bool, model: Path, sglang: str, folder: Path):
        from recipe.atropos.utils.process import free_port

        self.file, self.ours, self.folder = file, ours, folder
        folder.mkdir(parents=True)
        port = free_port()
        self.api = f"http://127.0.0.1:{port}"
        self.marks, self.log = folder / "marks", folder / "log"
        self._api_pid = forked(lambda: serve_api(port), folder / "api.log", folder)
        flags = {
            "slurm": "false",
            "env.rollout_server_url": self.api,
            "env.tokenizer_name": str(model),
            "env.group_size": GROUP_SIZE,
            "env.max_num_workers": 2,
            "env.use_wandb": "false",
            "env.total_steps": 1000,
            "env.ensure_scores_are_not_same": "false",  # a random policy is hardly ever right
            "openai.base_url": f"{sglang}/v1",
            "openai.model_name": str(model),
            "openai.server_type": "sglang",
            "openai.api_key": "x",
            "openai.health_check": "false",
        }
        self._flags = [f"--{key}={value}" for key, value in flags.items()]
        self._checkout = checkout
        self._pid: int | None = None
        self._started = time.monotonic()

    def begin(self) -> bool:
        """Once the API answers, register a trainer and start the environment; return whether it is started."""
        if self._pid is None and _get(f"{self.api}/status-of-the-api", 404) is not None:
            trainer = {
                "wandb_group": "g",
                "wandb_project": "p",
                "batch_size": 1000 * GROUP_SIZE,
                "max_token_len": CONTEXT,
                "checkpoint_dir": "",
                "save_checkpoint_interval": -1,
                "starting_step": 0,
                "num_steps": 1000,
            }
            _post(f"{self.api}/register", trainer)
            _get(f"{self.api}/batch")
            start = lambda: start_environment(self.file, self._flags, self.ours, self.marks)  # noqa: E731
            self._pid = forked(start, self.log, self._checkout)
            self._started = time.monotonic()
        return self._pid is not None

    def result(self) -> Outcome | None:
        """Return the outcome; None while the environment is still running."""
        if not self.begin():
            if time.monotonic() - self._started > 30:
                raise RuntimeError(f"{self.api}: the Trajectory API does not answer; see {self.folder}/api.log")
            return None
        seconds = time.monotonic() - self._started
        marks = self.marks.read_text().split("\n") if self.marks.exists() else []
        reached = next((stage for stage in ("set up", "import") if stage in marks), "")
        group = _get(f"{self.api}/latest_example") or {}
        if group.get("tokens"):
            return Outcome("group", sampled=share_with_logprobs(group), seconds=seconds)
        over = ended(self._pid)
        if not over and seconds < LIMIT and "no item" not in marks:
            return None
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        if "no item" in marks:
            return Outcome(
                reached, "gives no item to roll out: for evaluation alone", "is for evaluation", None, seconds
            )
        words = last_words(text)
        why = words if over else f"no group within {LIMIT:g} s: {words}"
        if "eval_environments" in self.file.parts:
            return Outcome(reached, why[:_SHOWN], "is for evaluation", None, seconds)
        return Outcome(reached, why[:_SHOWN], needs(text, why), None, seconds)

    def close(self) -> None:
        for pid in (self._pid, self._api_pid):
            if pid is not None:
                kill(pid)


def share_with_logprobs(group: dict[str, Any]) -> float:
    """Return the share of a posted group's trained tokens that have a logprob of their own (below or at 0)."""
    trained = with_logprob = 0
    logprobs = group.get("inference_logprobs") or [None] * len(group["masks"])
    for masks, values in zip(group["masks"], logprobs, strict=True):
        for position, mask in enumerate(masks):
            if mask != -100:
                trained += 1
                with_logprob += bool(values) and position < len(values) and values[position] <= 0
    return with_logprob / trained if trained else 0.0


def last_words(log: str) -> str:
    """Return the last line of the log that names an error, else the last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [
        line for line in lines if re.search(r"(Error|Exception|Exit)\b.*:|\berror\b|not sent|invalid|skipping", line)
    ]
    return re.sub(r"\s+", " ", (errors or lines or ["(nothing was printed)"])[-1])


def needs(log: str, why: str) -> str:
    """Return what is missing, by ``why`` or by the whole log: environments may catch that a data set is missing."""
    for what, pattern in NEEDS.items():
        if found := re.search(pattern, why if what in ("package", "file", "configuration of its own") else log):
            detail = next((group for group in found.groups() if group), "") if found.groups() else ""
            return re.sub(r" ?\(?/\S*", "", f"{what} {detail}").strip()[:80]  # no path of this machine
    return ""


def _get(url: str, but: int | None = None) -> Any:
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(url, timeout=10) as reply:
            return json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return {} if error.code == but else None
    except OSError:
        return None


def _post(url: str, body: Any) -> None:
    import urllib.request

    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=10).close()


# --------------------------------------------------------------------- all of them


def environment_files(checkout: Path, only: str) -> list[Path]:
    files = sorted((checkout / "environments").rglob("*.py"))
    return [file for file in files if only in str(file) and re.search(r"\.cli\(\)", file.read_text(errors="replace"))]


def run_all(files: list[Path], checkout: Path, model: Path, sglang: str, work: Path) -> dict[Path, dict[str, Outcome]]:
    outcomes: dict[Path, dict[str, Outcome]] = {file: {} for file in files}
    waiting = [(file, kind) for file in files for kind in ("stock", "ours")]
    running: dict[tuple[Path, str], Probe] = {}
    try:
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                file, kind = waiting.pop(0)
                folder = work / f"{file.relative_to(checkout / 'environments')}-{kind}".replace("/", "_")
                running[file, kind] = Probe(file, checkout, kind == "ours", model, sglang, folder)
            for (file, kind), probe in list(running.items()):
                if (outcome := probe.result()) is not None:
                    probe.close()
                    del running[file, kind]
                    outcomes[file][kind] = outcome
                    name = file.relative_to(checkout / "environments")
                    print(
                        f"{kind:<6}{str(name):<85}{outcome.reached or '-':<8}{outcome.needs or outcome.why}", flush=True
                    )
            time.sleep(0.2)
    finally:
        for probe in running.values():
            probe.close()
    return outcomes


def summarize(outcomes: dict[Path, dict[str, Outcome]], root: Path) -> tuple[str, dict[str, float]]:
    """Return the table, in Markdown, and its figures."""

    def cell(outcome: Outcome) -> str:
        if outcome.ran:
            return "sends groups" + ("" if outcome.sampled == 1.0 else f", {outcome.sampled:.0%} with logprobs")
        stage = {"": "does not import", "import": "imports", "set up": "sets up"}[outcome.reached]
        if outcome.needs.startswith("is "):
            return f"{stage}; {outcome.needs}"
        return f"{stage}; " + (f"needs {outcome.needs}" if outcome.needs else outcome.why).replace("|", "\\|")

    def able(pair: dict[str, Outcome]) -> bool:
        return pair["ours"].ran or pair["stock"].ran or not pair["ours"].needs

    lines = ["| environment | stock | through the adapter |", "|---|---|---|"]
    for file, pair in sorted(outcomes.items(), key=lambda item: (not able(item[1]), item[0])):
        stock, ours = cell(pair["stock"]), cell(pair["ours"])
        same = ours == stock and not pair["ours"].ran
        lines.append(f"| `{file.relative_to(root)}` | {stock} | {'the same' if same else ours} |")
    figures: dict[str, float] = {"files": len(outcomes)}
    for kind in ("stock", "ours"):
        figures[f"{kind}_import"] = sum(pair[kind].reached != "" for pair in outcomes.values())
        figures[f"{kind}_set_up"] = sum(pair[kind].reached in ("set up", "group") for pair in outcomes.values())
        figures[f"{kind}_send"] = sum(pair[kind].ran for pair in outcomes.values())
        figures[f"{kind}_send_all_logprobs"] = sum(pair[kind].sampled == 1.0 for pair in outcomes.values())
    figures["able_here"] = sum(map(able, outcomes.values()))
    return "\n".join(lines), figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--atropos-dir", type=Path, required=True, help="an Atropos checkout")
    parser.add_argument("--only", default="", help="files whose path has this in it")
    parser.add_argument("--quick", action="store_true", help="the files directly in environments/ alone")
    parser.add_argument("--logs", type=Path, help="keep the logs here")
    arguments = parser.parse_args()
    if not (arguments.atropos_dir / "environments").is_dir():
        parser.error(f"--atropos-dir {arguments.atropos_dir}: no folder environments there; give an Atropos checkout")
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "WANDB_MODE": "disabled",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
    }
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    work = Path(tempfile.mkdtemp(prefix="environments-"))
    try:
        return _main(arguments, work)
    finally:
        if arguments.logs:
            shutil.copytree(
                work, arguments.logs, dirs_exist_ok=True, ignore=shutil.ignore_patterns("checkout", "model")
            )
        shutil.rmtree(work, ignore_errors=True)


def _main(arguments: argparse.Namespace, work: Path) -> int:
    checkout = work / "checkout"  # environments write into their own folder
    shutil.copytree(arguments.atropos_dir, checkout, ignore=shutil.ignore_patterns(".git"))
    files = environment_files(checkout, arguments.only)
    if arguments.quick:
        files = [file for file in files if file.parent == checkout / "environments"]
    model = work / "model"
    texts = [path for path in sorted((checkout / "environments").rglob("*.py")) if path.stat().st_size < 200_000]
    child = forked(lambda: make_policy(model, texts), work / "model.log")
    if os.waitpid(child, 0)[1] != 0:
        raise RuntimeError((work / "model.log").read_text())

    from recipe.atropos.inference.client import SGLangClient
    from recipe.atropos.inference.server import SGLangLaunch, start_sglang
    from recipe.atropos.utils.process import free_port, wait_until_healthy

    async def serving() -> None:
        await wait_until_healthy(server, SGLangClient(server.url).health, 240)

    options = {"device": "cpu", "dtype": "float32", "extra_args": {"max_total_tokens": 65536}}
    launch = SGLangLaunch(str(model), port=free_port(), **options)
    server = start_sglang(launch, log_path=work / "sglang.log")
    try:
        asyncio.run(serving())
        # Import what every environment needs once, before forking the children that share it.
        import atroposlib.api.server  # noqa: F401
        import atroposlib.envs.base  # noqa: F401
        import uvicorn  # noqa: F401

        import recipe.atropos.utils.env_adapter  # noqa: F401

        outcomes = run_all(files, checkout, model, server.url, work / "probes")
    finally:
        server.stop()
    table, figures = summarize(outcomes, checkout / "environments")
    print("\n" + table + "\n")
    lacking = Counter(pair["ours"].needs.split()[0] for pair in outcomes.values() if pair["ours"].needs)
    print(f"needed and not here: {dict(lacking)}")
    if arguments.logs:
        details = {str(f.relative_to(checkout)): {k: asdict(o) for k, o in p.items()} for f, p in outcomes.items()}
        (work / "outcomes.json").write_text(json.dumps(details, indent=1))
    targets = {"ours_send": ">= able_here", "ours_send_all_logprobs": ">= ours_send"}
    ok = figures["ours_send"] >= figures["able_here"] and figures["ours_send_all_logprobs"] >= figures["ours_send"]
    print(json.dumps({"name": "environments", "figures": figures, "targets": targets, "ok": bool(ok)}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
