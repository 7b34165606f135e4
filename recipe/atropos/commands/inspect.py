"""Show one trajectory that a run trained on, token by token: ``verl-atropos inspect runs/NAME --step 3 --group 0``

Each token is styled by mask, logprob and advantage. The run must have kept its batches (``api.retention=all``, the
default). ``--sessions`` lists the newest sessions of a run's agents, ``--session ID`` shows one turn by turn.
"""

import argparse
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.style import Style
from rich.table import Table
from rich.text import Text

from recipe.atropos.config.models import needs_no_trust
from recipe.atropos.run.folder import RunDir
from recipe.atropos.run.status import find_run
from recipe.atropos.utils.files import printable

UNLIKELY = -3.0  # nats, a probability of 5%; a less likely token is underlined
_SESSIONS = 20  # that are listed
_LINES, _CHARACTERS = 6, 600  # of a text of a session


def style_of(token: dict[str, Any], largest: float) -> Style:
    """Return gray if not trained on, else green or red by the advantage's sign and size; underlined if unlikely."""
    if not token["trained"]:
        return Style(color="bright_black")
    share = min(1.0, abs(token["advantage"]) / largest) if largest else 0.0
    full, empty = int(60 + 140 * share), int(60 - 60 * share)
    color = (60, 60, 60) if share == 0 else (empty, full, empty) if token["advantage"] > 0 else (full, empty, empty)
    unlikely = token["logprob"] is not None and token["logprob"] < UNLIKELY
    return Style(color="white", bgcolor=f"rgb({color[0]},{color[1]},{color[2]})", underline=unlikely)


def token_table(
    tokens: Iterable[dict[str, Any]],
    numbers: Sequence[str],
    style: Callable[[dict[str, Any]], str | Style] = lambda _: "",
) -> Table:
    """Return a line for each token, as ``report.token_view`` has them, with these of its numbers."""
    grid = Table("position", "id", "token", "trained", *numbers)
    for token in tokens:
        values = ["" if token[name] is None else f"{token[name]:.4f}" for name in numbers]
        text = Text(repr(token["text"]), style(token))
        grid.add_row(str(token["position"]), str(token["id"]), text, "yes" if token["trained"] else "", *values)
    return grid


def show(
    files: RunDir, step: int, group: int, sequence: int, table: bool, console: Console, trust_remote_code: bool = False
) -> None:
    """Print one trajectory of a step; the model's custom code may run if ``trust_remote_code``, whatever the run's
    configuration says.
    """
    # imported here: torch and transformers take seconds
    from transformers import AutoTokenizer

    from recipe.atropos.config.compose import load_recorded
    from recipe.atropos.data.rows import environment_name
    from recipe.atropos.report.token_view import find_row, origin_of_advantages, rows_of_step, tokens_of_row

    config = load_recorded(files.config)
    config.run.dir, model = str(files.path), config.actor_rollout_ref.model
    model.trust_remote_code = trust_remote_code
    with needs_no_trust(model.path, trust_remote_code):
        rows = rows_of_step(config, step)
        tokenizer = AutoTokenizer.from_pretrained(model.path, trust_remote_code=trust_remote_code)
    row = find_row(rows, group, sequence)
    tokens = list(tokens_of_row(rows, row, tokenizer))
    trained = [token for token in tokens if token["trained"]]
    largest = max(abs(token["advantage"]) for token in trained)
    others = rows.non_tensor_batch
    environment = environment_name(others["env_name"][row], others["env_id"][row])
    versions = f"{others['policy_version_min'][row]} to {others['policy_version_max'][row]}"
    console.print(
        f"step {step}, group {group}, sequence {sequence} of {environment}: "
        f"score {rows.batch['token_level_scores'][row].sum():g}, {len(tokens)} tokens, {len(trained)} trained, "
        f"largest advantage {largest:.3g}, weight versions {versions}; "
        f"advantages: {origin_of_advantages(config, rows, row)}",
        markup=False,
    )
    console.print(
        f"gray: not trained on; green / red: advantage above / below 0; underlined: logprob under {UNLIKELY:g}"
    )
    console.print(Text.assemble(*((printable(token["text"]), style_of(token, largest)) for token in tokens)))
    if table:
        console.print(token_table(tokens, ["logprob", "advantage"], lambda token: style_of(token, largest)))


# ---------------------------------------------------------------- sessions


def list_sessions(files: RunDir, console: Console) -> None:
    """Print the newest sessions, a line for each."""
    from recipe.atropos.report.session_view import about, read_sessions

    grid = Table("session", "environment", "item", "turns", "tokens", "rows", "end", "forks")
    for session in read_sessions(files, _SESSIONS):
        grid.add_row(*(Text(printable(str(value))) for value in about(session).values()))
    console.print(grid)


def show_session(files: RunDir, identifier: str, console: Console) -> None:
    """Print a session turn by turn, indented where several turns continue one."""
    from recipe.atropos.report.session_view import about, read_sessions, turns_of

    for session in read_sessions(files, identifier=identifier):
        console.print(Text(printable(", ".join(f"{name} {value}" for name, value in about(session).items()))))
        for turn in turns_of(session):
            place = f" after {turn['parent']}" if not turn["begins"] else f", begins anew: {turn['begins']}"
            weights = " to ".join(str(version) for version in dict.fromkeys(turn["versions"] or ["unknown"]))
            title = f"turn {turn['number']}{place if turn['number'] else ''} ({turn['tokens']} tokens, "
            lines = [
                Text(f"{title}weights {weights}, row {turn['row']})", "bold"),
                *(_said(who, text, "") for who, text in turn["added"]),
                *(_said(who, text, "bright_black" if who == "thinking" else "green") for who, text in turn["reply"]),
            ]
            console.print(Padding(Text("\n").join(lines), (1, 0, 0, 4 * turn["level"])))


def _said(who: str, text: str, style: str) -> Text:
    """Return who says a text, and its first lines."""
    text = printable(text).strip()
    kept = "\n".join(text.splitlines()[:_LINES])[:_CHARACTERS]
    more = f" [... {len(text) - len(kept):,} more characters]" if len(kept) < len(text) else ""
    return Text.assemble(f"  {printable(who)}: ", (kept.replace("\n", "\n      "), style), more)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of a run, or its name below runs/")
    parser.add_argument("--step", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--group", type=int, default=0, help="its place in the batch, from 0")
    parser.add_argument("--sequence", type=int, default=0, help="its place in the group, from 0")
    parser.add_argument("--table", action="store_true", help="also one line per token")
    parser.add_argument(
        "--sessions", action="store_true", help=f"list the newest {_SESSIONS} sessions of agents instead"
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    parser.add_argument("--session", metavar="ID", help="or print one of them, turn by turn")


def main(given: argparse.Namespace) -> int:
    console = Console(highlight=False)
    files = find_run(given.run)
    if given.sessions:
        list_sessions(files, console)
    elif given.session is not None:
        show_session(files, given.session, console)
    else:
        show(files, given.step, given.group, given.sequence, given.table, console, given.trust_remote_code)
    return 0
