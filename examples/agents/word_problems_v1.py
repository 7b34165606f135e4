"""A small environment of verifiers: word problems of a file, a calculator, and answers that are read from a box."""

import json
from collections.abc import Iterator
from pathlib import Path

import verifiers.v1 as vf
from calculator import calculate


class Problem(vf.TaskData):
    answer: str


class Calculator(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = None  # the tool is calculate, not calculator_calculate

    @vf.tool
    async def calculate(self, expression: str) -> str:
        return calculate(expression)


class SolveTask(vf.Task[Problem]):
    @vf.reward
    async def boxed(self, trace: vf.Trace) -> float:
        return float(rf"\boxed{{{self.data.answer}}}" in trace.last_reply)


class WordProblemsConfig(vf.TasksetConfig):
    file: Path = Path("problems.jsonl")


class WordProblems(vf.Taskset[SolveTask, WordProblemsConfig]):
    @classmethod
    def toolsets(cls, config: WordProblemsConfig) -> list[vf.Toolset]:
        return [Calculator(vf.SharedToolsetConfig())]

    def load(self) -> Iterator[SolveTask]:
        for line in self.config.file.read_text().splitlines():
            row = json.loads(line)
            yield SolveTask(Problem(prompt=row["question"], answer=row["answer"]), self.config.task)


__all__ = ["WordProblems"]

if __name__ == "__main__":  # as a server of its tools
    Calculator.run()
