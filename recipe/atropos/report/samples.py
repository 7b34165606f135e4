"""The samples of a run that its page shows: rows spread over its steps, and how answers to one item changed.

Bounded for any run: so many steps, rows, characters and tokens. Of a step, the best and the worst rows are taken first,
and then rows of groups that are not shown yet.
"""

import contextlib
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from recipe.atropos.report.curves import spread
from recipe.atropos.report.run_history import RunHistory
from recipe.atropos.utils.files import read_lines

STEPS = 16  # whose samples are shown
ROWS = 10  # of each
SCANNED = 64  # steps that are read for histograms and for items that come back
CHARACTERS = 3_000  # of a text; the middle of a longer one is left out
_NOTE = 50  # of these, at most, that say how many are left out
TOKENS = 24_000  # in all
TOKENS_OF_A_ROW = 2_000
ITEMS = 24
_ANSWERS = 12  # of an item
SESSIONS = 256  # that are looked at, for the newest of each environment
TURNS = 24  # of a session
PARTS = 8  # of what a turn adds, as many of its reply
Answer = tuple[str, str, int, str, str, float | None]  # kind, environment, step, prompt, text and score
_LATER = "Tokens with mask, logprob and advantage: python -m recipe.atropos report RUN writes this page with them."


def rollouts_of(history: RunHistory, limit: int = SCANNED) -> dict[int, list[dict[str, Any]]]:
    """Return the recorded rows of at most ``limit`` steps, evenly spread over those that were recorded.

    Outputs that ``chosen_rows`` leaves out are shortened: a batch of long answers has gigabytes over so many steps.
    """
    own, configured = history.run.rollouts, history.config.get("trainer.rollout_data_dir")
    # Below its former folder, if the run was moved, may be another run's.
    elsewhere = configured and Path(configured).parent != Path(history.config.get("run.dir", ""))
    folder = Path(configured) if elsewhere and not own.exists() else own
    recorded = (int(path.stem) for path in folder.glob("*.jsonl") if path.stem.isdigit())
    steps = spread(sorted(step for step in recorded if step <= history.steps), limit)
    return {step: _read_rows(folder / f"{step}.jsonl") for step in steps}


def _read_rows(path: Path) -> list[dict[str, Any]]:
    rows, prompts = read_lines(path), {}
    whole = {id(row) for row in chosen_rows(rows)}
    for row in rows:
        row["input"] = prompts.setdefault(row["input"], row["input"])  # one text for all of a group
        if id(row) not in whole:
            row["output"] = shortened(row["output"])
    return rows


def chosen_rows(rows: list[dict[str, Any]], limit: int = ROWS) -> list[dict[str, Any]]:
    """Return at most ``limit`` rows, each answer once: the best, the worst, and then of groups not among them."""
    different = {(row["uid"], row["output"]): row for row in reversed(rows)}.values()
    by_score = sorted(different, key=lambda row: -row["score"])  # stable: the same page for the same run
    order = [*itertools.chain(*zip(by_score, reversed(by_score), strict=True))][: limit // 2]
    of_group: dict[str, dict[str, Any]] = {}
    for row in (*order, *by_score):
        of_group.setdefault(row["uid"], row)
    return list({id(row): row for row in (*order, *of_group.values(), *by_score)}.values())[:limit]


def samples(
    history: RunHistory, rollouts: Mapping[int, list[dict[str, Any]]], with_tokens: bool = True
) -> dict[str, Any]:
    """Return ``{"prompts", "rows", "note"}``; a row refers to its prompt by number, and has tokens if there are any."""
    chosen = {step: chosen_rows(rollouts[step]) for step in spread([*rollouts], STEPS)}
    tokens, note = _tokens(history, chosen) if with_tokens else ({}, _LATER)
    prompts: dict[str, int] = {}
    found = []
    for step, rows in chosen.items():
        for place, row in enumerate(rows):
            shown = {
                "step": step,
                "group": row["uid"],
                "environment": row.get("env_name") or "",
                "prompt": prompts.setdefault(shortened(row["input"]), len(prompts)),
                "answer": shortened(row["output"]),
                "score": row["score"],
                "raw": row.get("raw_score"),
                "versions": [row.get("policy_version_min"), row.get("policy_version_max")],
                "length": row.get("response_tokens"),
            }
            found.append(shown | tokens.get((step, place), {}))
    return {"prompts": list(prompts), "rows": found, "note": note}


def shortened(text: str, limit: int = CHARACTERS) -> str:
    """Return a text of at most ``limit`` characters, in place of its middle how many are left out; the same if it is
    shortened again.
    """
    if len(text) <= limit:
        return text
    kept = limit - _NOTE
    return f"{text[: kept * 2 // 3]} [... {len(text) - kept:,} characters left out ...] {text[-kept // 3 :]}"


def _tokens(history: RunHistory, chosen: Mapping[int, list[dict[str, Any]]]) -> tuple[dict[tuple[int, int], Any], str]:
    """Return tokens by (step, place among the chosen rows), and why there are none, or ''.

    Whatever is the matter with a run's store, model or tokenizer, its page is written without tokens.
    """
    if not history.run.trajectories.is_dir():
        return {}, "Tokens are not shown: the run kept no batches (api.retention)."
    try:
        # imported here: torch, verl and transformers take seconds
        from recipe.atropos.report.token_view import token_columns

        return token_columns(history, chosen, TOKENS, TOKENS_OF_A_ROW), ""
    except Exception as error:
        return {}, f"Tokens are not shown: {str(error).splitlines()[0] if str(error) else type(error).__name__}"


# ---------------------------------------------------------------- sessions


def sessions(history: RunHistory) -> tuple[list[dict[str, Any]], str]:
    """Return the session of each environment that was opened last, of those that have ended, and why there are none,
    or ''. Each is what ``session_view`` says about it, with its first turns as ``turns_shown``.

    Whatever is the matter with the file, the page is written.
    """
    if not history.run.sessions.exists():
        return [], ""
    found: dict[str, dict[str, Any]] = {}
    try:
        # imported here: what reads and writes chats takes seconds
        from recipe.atropos.report.session_view import about, read_sessions, turns_of

        for session in read_sessions(history.run, SESSIONS):
            if session.state.end is not None and session.state.env not in found:
                turns = [turn | _short(turn) for turn in itertools.islice(turns_of(session), TURNS)]
                found[session.state.env] = about(session) | {"turns_shown": turns}
    except Exception as error:
        return [], f"Sessions are not shown: {error}"
    return [*found.values()], ""


def _short(turn: Mapping[str, Any]) -> dict[str, list[tuple[str, str]]]:
    """Return what a turn added, and its reply: the last parts, shortened."""
    return {
        name: [("left out", f"{len(turn[name]) - PARTS} before")] * (len(turn[name]) > PARTS)
        + [(who, shortened(text, CHARACTERS // 3)) for who, text in turn[name][-PARTS:]]
        for name in ("added", "reply")
    }


# ---------------------------------------------------------------- items


def items(history: RunHistory, rollouts: Mapping[int, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return items that were answered several times: ``{"kind", "environment", "prompt", "answers"}``.

    Held-out items come first, and among them those whose score changed. An answer is ``{"at", "answer", "score"}``, the
    first of its step.
    """
    answers: dict[tuple[str, str, str], dict[int, dict[str, Any]]] = defaultdict(dict)
    for kind, environment, at, prompt, answer, score in itertools.chain(_held_out(history), _trained(rollouts)):
        of_item = answers[kind, environment, prompt]
        of_item.setdefault(at, {"at": at, "answer": shortened(answer), "score": score})
    several = [
        {
            "kind": kind,
            "environment": environment,
            "prompt": shortened(prompt),
            "answers": spread([*of_item.values()], _ANSWERS),
        }
        for (kind, environment, prompt), of_item in answers.items()
        if len(of_item) > 1
    ]

    def key(item: dict[str, Any]) -> tuple[bool, bool]:
        scores = [answer["score"] for answer in item["answers"] if answer["score"] is not None]
        return item["kind"] != "held out", not scores or scores[0] == scores[-1]

    by_kind = [list(group) for _, group in itertools.groupby(sorted(several, key=key), key)]
    return [item for group in by_kind for item in spread(group, ITEMS // 2)][:ITEMS]


def _held_out(history: RunHistory) -> Iterable[Answer]:
    files = [path for path in history.run.evaluation.glob("*/*/samples.jsonl") if path.parts[-3].isdigit()]
    files.sort(key=lambda path: (path.parts[-2], int(path.parts[-3])))
    for environment, of_versions in itertools.groupby(files, lambda path: path.parts[-2]):
        for path in spread([*of_versions], _ANSWERS):
            for sample in _recorded_samples(path):
                if (read := _evaluated(sample)) is not None:
                    yield "held out", environment, int(path.parts[-3]), *read


def _recorded_samples(path: Path) -> Iterable[dict[str, Any]]:
    """Yield the samples in a file that an environment wrote, as it likes: other lines are left out, NaN is a number."""
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_bytes().splitlines():
            with contextlib.suppress(ValueError):
                if isinstance(sample := json.loads(line), dict):
                    yield sample


def _evaluated(sample: Mapping[str, Any]) -> tuple[str, str, float | None] | None:
    """Read what an environment wrote of an evaluated item: prompt, answer and score; None if it is of another form."""
    messages = sample.get("messages")
    if isinstance(messages, list) and len(messages) > 1 and all(isinstance(each, dict) for each in messages):
        *before, last = [str(message.get("content", "")) for message in messages]
        prompt, answer = "\n".join(before), last
    elif "question" in sample and ("answer" in sample or "response" in sample):
        prompt, answer = str(sample["question"]), str(sample.get("response", sample.get("answer")))
    else:
        return None
    score = sample.get("score", sample.get("correct"))
    prompt, answer = (text.encode(errors="replace").decode() for text in (prompt, answer))  # half of a surrogate pair
    return prompt, answer, float(score) if isinstance(score, int | float) and math.isfinite(score) else None


def _trained(rollouts: Mapping[int, list[dict[str, Any]]]) -> Iterable[Answer]:
    for step, rows in rollouts.items():
        for row in rows:
            yield "trained on", row.get("env_name") or "", step, row["input"], row["output"], row["score"]
