"""The environment over reasoning-gym, and the policy that is taught its sums."""

import random
import sys
from types import SimpleNamespace

import pytest

from helpers.items import asked
from recipe.atropos.demo.policies import SETTINGS, TASK, TwoTaskRecipe, sum_solution
from recipe.atropos.environments.plain_answers import is_plain
from recipe.atropos.environments.reasoning import ReasoningEnv, ReasoningEnvConfig, dataset, held_out, score
from recipe.atropos.launcher.environment_processes import environment_variables
from recipe.atropos.utils.machine import run_program


@pytest.fixture
def make(make_env):
    return lambda **options: make_env(ReasoningEnv, task=TASK, task_config=SETTINGS, **options)


def test_reasoning_holds_out_no_training_problem(make):
    """A seed changes only the training problems. Where all are held out, that is an error."""
    envs = [make(seed=seed, eval_size=64) for seed in (0, 1)]
    held_back, held_back_too = ([problem["question"] for problem in env.test] for env in envs)
    first, other = ([problem["question"] for problem in asked(env, 300)] for env in envs)
    assert held_back == held_back_too and len(set(held_back)) == 64
    assert not set(held_back) & (set(first) | set(other))
    assert first != other and first[1:] != other[:-1], "reasoning-gym's neighbouring seeds are one sequence, shifted"
    for task in ("pool_matrix", TASK):  # the first takes seeds of 32 bits only
        assert held_out(task, "{}", 2) and dataset(task, "{}", 3, 10**9)[2]["question"]
    env = make(train_size=3, eval_size=8)
    env._held_out = {env.train[i]["question"] for i in range(3)}
    with pytest.raises(ValueError, match="all of the 3 training problems are among the"):
        asked(env, 1)


def test_reasoning_problems_are_the_same_each_time():
    """Of a task that draws from Python's own generator too, whose state stays."""
    random.seed(7)
    state = random.getstate()
    found = held_out("list_functions", "{}", 16)
    assert random.getstate() == state
    random.seed(8)
    assert held_out("list_functions", "{}", 16) == found
    train = dataset("list_functions", "{}", 9, 0)
    assert train[3] == train[3] == [*train][3] and len(train) == 9


def test_processes_of_a_run_have_the_same_hashes(monkeypatch):
    """Whatever the launcher's own, since the problems of some tasks depend on them."""
    spec, run = SimpleNamespace(args={}, python=None), SimpleNamespace(environments_key="k", sessions_url=None)
    run.config = SimpleNamespace(inference=SimpleNamespace(host="127.0.0.1"))
    found = set()
    for own in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", own)
        found.add(run_program(sys.executable, "-c", "print(hash('a'))", **environment_variables(run, spec)))
    assert len(found) == 1


@pytest.mark.parametrize("randomized", [0, 1])
def test_reasoning_by_hand_says_that_hashes_differ(randomized, caplog, monkeypatch):
    python = SimpleNamespace(flags=SimpleNamespace(hash_randomization=randomized))
    monkeypatch.setattr("recipe.atropos.environments.reasoning.sys", python)
    ReasoningEnv.load(ReasoningEnvConfig(train_size=1, eval_size=1))
    assert ("set PYTHONHASHSEED=0" in caplog.text) == randomized


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer>-4</answer>", 1.0),
        ("<think><answer>9</answer></think> <answer> -4 </answer>", 1.0),
        ("<think><answer>-4</answer></think> so", 0.0),
        ("-4", 0.0),
        ("<answer></answer>", 0.0),
    ],
)
def test_the_task_scores_what_stands_between_the_tags(text, expected):
    assert score(dataset(TASK, SETTINGS, 1, 0), text, {"answer": "-4"}) == expected


def test_reasoning_counts_an_answer_that_the_parser_fails_on(make):
    """The parser is the task's own; such an answer scores nothing."""
    environment = make()
    environment.train = dataset("prime_factorization", "{}", 2, 0)
    problem = environment.train[0]
    assert score(environment.train, "<answer>seven</answer>", problem) is None
    assert environment.task_score("<answer>seven</answer>", problem) == 0.0
    assert environment.task_score(f"<answer>{problem['answer']}</answer>", problem) == 1.0
    assert environment.report.counts["unreadable_answers"] == 1


@pytest.mark.parametrize(
    ("task", "settings", "message"),
    [
        ("sums", "{}", "--env.task=sums: reasoning-gym has no such task; it has ab, "),
        (TASK, "{min_trms: 2}", "--env.task_config={min_trms: 2} does not suit"),
        (TASK, "{min_terms: 0}", "min_terms must be positive"),
        (TASK, "{min_terms", "does not suit"),
    ],
)
def test_a_task_or_setting_that_is_not_there_is_refused_by_name(task, settings, message):
    with pytest.raises(ValueError) as refusal:
        dataset(task, settings, 1, 0)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    "task",
    "countdown puzzle24 polynomial_multiplication simple_integration intermediate_integration string_insertion "
    "spiral_matrix binary_matrix n_queens".split(),
)
def test_reasoning_reads_answers_and_runs_none(task, tmp_path):
    """Each task's own answer keeps its full score."""
    train, mark = dataset(task, "{}", 6, 0), tmp_path / "written"
    for problem in [train[i] for i in range(6)]:
        assert score(train, f"<answer>{problem['answer']}</answer>", problem) == 1
    hostile = (
        f"[open('{mark}', 'w').write('x')]",
        "9**9**9",
        "exit()",
        "factorial(10**9)",
        "x.y",
        "{[1]: 2}",
        "(" * 999,
        "oracle_answer",
    )
    for answer in hostile:
        assert score(train, f"<answer>{answer}</answer>", train[0]) < 0.1
    assert not mark.exists()


def test_reasoning_reads_a_list_where_a_task_takes_one():
    train = dataset("spiral_matrix", "{}", 1, 0)
    as_list = [int(number) for number in train[0]["answer"].split()]
    assert score(train, f"<answer>{as_list}</answer>", train[0]) == 0.1


PLAIN = ["X**2 / 2 - 3*Integral(sin(X), X) + C", "0.5*X**(3/2) + X**-1 + log(Abs(cos(2*X)))"]
OTHERS = (
    "X**X X**65 (X**9)**9 X**(1/65) X**(1/0) 10**65 1e400 X*Integral(sin(X),X) sin(exp(9)) 'X' 5! [X] sin sin() "
    "sin(X,evaluate=False) gamma(X) X.diff(X) (X+Y)**2"
).split()


@pytest.mark.parametrize("answer", [*PLAIN, *OTHERS, "1" * 65, "1" + "+1" * 1000])
def test_reasoning_reads_plain_expressions_alone(answer):
    """What is cheap to work out, as far as that can be seen."""
    scorer = dataset("simple_integration", "{}", 1, 0).score_answer
    assert is_plain(answer, {"answer": "X**3 / 3 + C", "metadata": {"integrand": "X**2"}}, scorer) == (answer in PLAIN)
    assert is_plain("exp(X)", {"answer": "X", "metadata": {}}, scorer) is False


@pytest.mark.parametrize(
    ("task", "settings"),
    [
        ("polynomial_multiplication", "{min_degree: 10, max_degree: 30}"),
        (
            "polynomial_multiplication",
            "{variables: [x, y, z], allow_cross_variable_product: true, allow_multivariate_polynomials: true}",
        ),
        ("simple_integration", "{max_degree: 80}"),
    ],
)
def test_reasoning_scores_steep_answers_in_other_words(task, settings):
    """The limits grow with the problem's own answer."""
    train = dataset(task, settings, 20, 0)
    for problem in [train[i] for i in range(20)]:
        for text in (problem["answer"], f"({problem['answer']})"):
            assert score(train, f"<answer>{text}</answer>", problem) == 1


def test_reasoning_policy_is_taught_sums_that_stop_early():
    rng, task = random.Random(0), dataset(TASK, SETTINGS, 1, 0)
    for problem in held_out(TASK, SETTINGS, 64):
        assert score(task, sum_solution(problem["question"], rng, 0.0), problem) == 1.0
    assert sum_solution("... problem: 4 - 1 - 7 =", rng, 1.0) == "4 - 1 = 3 <answer>3</answer>"
    assert sum_solution("... problem: 4 - 7 =", rng, 1.0) == "4 - 7 = -3 <answer>-3</answer>"
    taught = {chat[0]["content"] for chat in TwoTaskRecipe(problems=500).chats(0, rng)}
    assert not taught & {problem["question"] for problem in held_out(TASK, SETTINGS, 256)}
