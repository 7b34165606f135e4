"""Show one trajectory that a run trained on, token by token: ``verl-atropos inspect runs/NAME --step 3 --group 0``

Each token is styled by mask, logprob and advantage. The run must have kept its batches (``api.retention=all``, the
default). ``--sessions`` lists the newest sessions of a run's agents, ``--session ID`` shows one turn by turn.
"""

import argparse
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.padding import Padding
from rich.style import Style
from rich.table import Table
from rich.text import Text

from recipe.atropos.errors import ConfigurationError, one_line_errors
from recipe.atropos.run.folder import RunDir
from recipe.atropos.run.status import find_run
from recipe.atropos.utils.files import printable

if TYPE_CHECKING:
    from recipe.atropos.sessions.session import Session

UNLIKELY = -3.0  # nats, a probability of 5%; a less likely token is underlined
_SESSIONS = 20  # that are listed
_LINES, _CHARACTERS, _ITEM = 6, 600, 60  # of a text, and characters of an item


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


def show(files: RunDir, step: int, group: int, sequence: int, table: bool, console: Console) -> None:
    """Print one trajectory of a step."""
    # imported here: torch and transformers take seconds
    from transformers import AutoTokenizer

    from recipe.atropos.config.compose import load_recorded
    from recipe.atropos.data.rows import environment_name
    from recipe.atropos.report.token_view import find_row, rows_of_step, tokens_of_row

    config = load_recorded(files.config)
    config.run.dir = str(files.path)
    rows = rows_of_step(config, step)
    row = find_row(rows, group, sequence)
    model = config.actor_rollout_ref.model
    tokenizer = AutoTokenizer.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    tokens = list(tokens_of_row(rows, row, tokenizer))
    trained = [token for token in tokens if token["trained"]]
    largest = max(abs(token["advantage"]) for token in trained)
    others = rows.non_tensor_batch
    environment = environment_name(others["env_name"][row], others["env_id"][row])
    versions = f"{others['policy_version_min'][row]} to {others['policy_version_max'][row]}"
    console.print(
        f"step {step}, group {group}, sequence {sequence} of {environment}: "
        f"score {rows.batch['token_level_scores'][row].sum():g}, {len(tokens)} tokens, {len(trained)} trained, "
        f"largest advantage {largest:.3g}, weight versions {versions}",
        markup=False,
    )
    legend = Text("grey: not trained on; green / red: advantage above / below 0; underlined: logprob under ")
    console.print(legend.append(f"{UNLIKELY:g}"))
    console.print(Text.assemble(*((token["text"], style_of(token, largest)) for token in tokens)))
    if table:
        console.print(token_table(tokens, ["logprob", "advantage"], lambda token: style_of(token, largest)))


# ---------------------------------------------------------------- sessions


def list_sessions(files: RunDir, console: Console) -> None:
    """Print the newest sessions, a line for each."""
    from recipe.atropos.report.session_view import newest_sessions

    grid = Table("session", "environment", "item", "turns", "tokens", "rows", "end", "forks")
    for session in newest_sessions(files, _SESSIONS):
        state, seen = session.state, session.summary()
        values = (state.id, state.env, _item(session), seen["turns"], seen["sampled"], seen["rows"], _end(session))
        grid.add_row(*(Text(printable(str(value))) for value in (*values, _forks(session))))
    console.print(grid)


def show_session(files: RunDir, identifier: str, console: Console) -> None:
    """Print a session turn by turn, what several turns continue indented. Raises ConfigurationError: there is none."""
    from recipe.atropos.report.session_view import open_sessions, turns_of
    from recipe.atropos.sessions.session import Session

    with open_sessions(files) as store:
        session = Session.load(store, identifier)
        if session is None:
            raise ConfigurationError(f"{files.path} has no session {identifier}; --sessions lists the newest")
        turns = list(turns_of(session))
    state, seen = session.state, session.summary()
    what = f"session {state.id} of {state.env}, item {_item(session)}\n{_end(session)}; {seen['turns']} turns, "
    what += f"{seen['sampled']} tokens sampled, {seen['rows']} rows; forks: {_forks(session) or 'none'}"
    console.print(Text(printable(what)))
    for turn in turns:
        after = "" if turn["parent"] is None else f" after {turn['parent']}"
        begins = f", begins anew: {turn['begins']}" if turn["begins"] and turn["number"] else ""
        versions = "unknown" if turn["versions"] is None else " to ".join(map(str, dict.fromkeys(turn["versions"])))
        title = f"turn {turn['number']}{after}{begins} ({turn['tokens']} tokens, weights {versions}, row {turn['row']})"
        lines = [Text(title, "bold")]
        lines += [_said(who, text, "") for who, text in turn["added"]]
        lines += [
            _said(who, text, "italic bright_black" if who == "thinking" else "green") for who, text in turn["reply"]
        ]
        console.print(Padding(Text("\n").join(lines), (1, 0, 0, 4 * turn["level"])))


def _said(who: str, text: str, style: str) -> Text:
    """Return who says a text, and its first lines."""
    from recipe.atropos.report.samples import shortened

    lines = printable(text).strip().splitlines()
    kept = shortened("\n".join(lines[:_LINES]), _CHARACTERS).replace("\n", "\n      ")
    more = f" [... {len(lines) - _LINES} more lines]" if len(lines) > _LINES else ""
    return Text.assemble(f"  {printable(who)}: ", (kept, style), more)


def _item(session: "Session") -> str:
    return msgspec.json.encode(session.state.item).decode()[:_ITEM]


def _end(session: "Session") -> str:
    state = session.state
    return f"reward {state.reward:g}" if state.reward is not None else state.end or "running"


def _forks(session: "Session") -> str:
    return ", ".join(f"{cause} {n}" for cause, n in session.forks.items())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="verl-atropos inspect", description="Print one trajectory of a step.")
    parser.add_argument("run", metavar="RUN", help="folder of a run, or its name below runs/")
    parser.add_argument("--step", type=int, default=1)
    parser.add_argument("--group", type=int, default=0, help="its place in the batch")
    parser.add_argument("--sequence", type=int, default=0)
    parser.add_argument("--table", action="store_true", help="also one line per token")
    parser.add_argument(
        "--sessions", action="store_true", help=f"list the newest {_SESSIONS} sessions of agents instead"
    )
    parser.add_argument("--session", metavar="ID", help="or print one of them, turn by turn")
    given = parser.parse_args(argv)
    console = Console(highlight=False)
    with one_line_errors(OmegaConfBaseException, OSError, sqlite3.Error):
        files = find_run(given.run)
        if given.sessions:
            list_sessions(files, console)
        elif given.session is not None:
            show_session(files, given.session, console)
        else:
            show(files, given.step, given.group, given.sequence, given.table, console)
    return 0
