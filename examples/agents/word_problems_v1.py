"""A tiny environment of verifiers: word problems of a file, whose answers are read from a box."""

import json
from collections.abc import Iterator
from pathlib import Path

import verifiers.v1 as vf


class Problem(vf.TaskData):
    answer: str


class SolveTask(vf.Task[Problem]):
    @vf.reward
    async def boxed(self, task: Problem, trace: vf.Trace) -> float:
        return float(rf"\boxed{{{task.answer}}}" in trace.last_reply)


class WordProblemsConfig(vf.TasksetConfig):
    file: Path


class WordProblems(vf.Taskset[SolveTask, WordProblemsConfig]):
    def load(self) -> Iterator[SolveTask]:
        for line in self.config.file.read_text().splitlines():
            row = json.loads(line)
            yield SolveTask(Problem(prompt=row["question"], answer=row["answer"]))


__all__ = ["WordProblems"]
