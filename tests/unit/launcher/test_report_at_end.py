"""What the launcher leaves of a run to look at."""

from helpers.seeded_runs import healthy_run
from recipe.atropos.launcher.launch import write_page_of_failure, write_pictures
from recipe.atropos.run.folder import RunDir
from recipe.atropos.utils.files import read_lines, rewrite_lines


def test_the_launcher_leaves_a_plot_and_a_page(tmp_path, capsys):
    run = RunDir(healthy_run(tmp_path))
    write_pictures(run)
    page = run.report.read_text()
    assert run.reward_picture.stat().st_size > 10_000 and "Learned: " in page and "writes this page with them" in page
    assert capsys.readouterr().out == ""


def test_a_page_that_cannot_be_written_ends_no_run(tmp_path, capsys):
    run = RunDir(healthy_run(tmp_path / "a run"))
    run.summary.write_text("{")
    write_pictures(run)
    told = capsys.readouterr().out
    assert "summary.json is damaged" in told and f" report '{run.path}' writes it" in told
    assert not run.report.exists()


def test_a_run_that_fails_leaves_a_page_and_says_where(tmp_path, capsys):
    run = RunDir(healthy_run(tmp_path))
    write_page_of_failure(run)
    assert "Learned: " in run.report.read_text() and "report.html: the run up to its end" in capsys.readouterr().out
    empty = RunDir(tmp_path / "empty")
    write_page_of_failure(empty)
    assert not empty.report.exists() and capsys.readouterr().out == ""


def test_the_page_of_a_failure_says_that_the_run_stopped(tmp_path):
    """Its launcher writes the page, and still holds the folder."""
    run = RunDir(healthy_run(tmp_path))
    rewrite_lines(run.metrics, read_lines(run.metrics)[:30])
    with run.lock():
        write_page_of_failure(run)
    page = run.report.read_text()
    assert '"state":"stopped before it was finished"' in page and "Stopped at step 30 of 60." in page
