"""Stored results: what is written, what survives an interruption, what counts as agreement."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from samkit import experiments, results
from samkit.experiments import Experiment, compute
from samkit.experiments.__main__ import main


def square(seed, factor=1.0, log=None, fail_at=None):
    if log is not None:
        with open(log, "a") as file:
            file.write(f"{seed}\n")
    if seed == fail_at:
        raise ArithmeticError("told to fail")
    return {"square": factor * seed**2, "powers": np.array([seed, seed**2]), "nothing": math.nan}


def experiment_with_log(folder, **options):
    log = folder / "log.txt"
    return Experiment(square, {"log": str(log), **options}, seeds=range(4)), log


def stored(folder, name="squares"):
    return results.read(folder / f"{name}.json")


def test_rows_come_back_as_columns_in_the_order_of_the_seeds(tmp_path):
    compute("squares", Experiment(square, {"factor": 2.0}, seeds=[3, 1, 2]), tmp_path, workers=1)
    got = stored(tmp_path)
    assert got.seeds == [3, 1, 2]
    assert got.column("square").tolist() == [18, 2, 8]
    assert got.column("powers").shape == (3, 2)
    assert np.isnan(got.column("nothing")).all()


def test_two_processes_store_the_same_rows_as_one(tmp_path):
    for name, workers in (("one", 1), ("two", 2)):
        compute(name, Experiment(square, seeds=range(5)), tmp_path, workers=workers)
    one, two = stored(tmp_path, "one"), stored(tmp_path, "two")
    assert one.rows == two.rows
    assert one.seeds == two.seeds == list(range(5))


def test_the_file_says_what_when_and_where(tmp_path):
    compute("squares", Experiment(square, seeds=range(2)), tmp_path, workers=1)
    got = stored(tmp_path)
    assert got.function.endswith("test_results.square")
    assert got.config == {}
    assert len(got.provenance["seconds"]) == 2
    (environment,) = got.provenance["environments"]
    assert {"python", "torch", "numpy", "samkit"} <= environment["versions"].keys()
    assert environment["machine"]["cores"] >= 1


def test_the_file_is_strict_json_for_readers_in_other_languages(tmp_path):
    compute("squares", Experiment(square, seeds=range(2)), tmp_path, workers=1)

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    json.loads((tmp_path / "squares.json").read_text(), parse_constant=refuse)


def test_a_second_run_computes_nothing(tmp_path):
    experiment, log = experiment_with_log(tmp_path)
    assert compute("squares", experiment, tmp_path, workers=1) == 4
    assert compute("squares", experiment, tmp_path, workers=1) == 0
    assert len(log.read_text().split()) == 4


def test_force_computes_everything_again(tmp_path):
    experiment, log = experiment_with_log(tmp_path)
    for force in (False, True):
        assert compute("squares", experiment, tmp_path, workers=1, force=force) == 4
    assert len(log.read_text().split()) == 8


def test_more_seeds_add_rows_and_keep_the_old_ones(tmp_path):
    experiment, log = experiment_with_log(tmp_path)
    compute("squares", experiment, tmp_path, workers=1)
    longer = Experiment(square, experiment.config, seeds=range(6))
    assert compute("squares", longer, tmp_path, workers=1) == 2
    assert stored(tmp_path).seeds == list(range(6))
    assert log.read_text().split() == list("012345")


def test_fewer_seeds_drop_rows_without_computing(tmp_path):
    experiment, _ = experiment_with_log(tmp_path)
    compute("squares", experiment, tmp_path, workers=1)
    assert compute("squares", Experiment(square, experiment.config, seeds=[2, 0]), tmp_path, workers=1) == 0
    assert stored(tmp_path).column("square").tolist() == [4, 0]


def test_another_configuration_starts_again(tmp_path):
    compute("squares", Experiment(square, {"factor": 1.0}, seeds=range(3)), tmp_path, workers=1)
    assert compute("squares", Experiment(square, {"factor": 3.0}, seeds=range(3)), tmp_path, workers=1) == 3
    assert stored(tmp_path).column("square").tolist() == [0, 3, 12]


def test_a_failing_seed_keeps_the_finished_ones_and_the_stored_file(tmp_path):
    experiment, log = experiment_with_log(tmp_path)
    compute("squares", experiment, tmp_path, workers=1)
    before = (tmp_path / "squares.json").read_bytes()
    failing = Experiment(square, {"log": str(log), "fail_at": 2}, seeds=range(4))
    with pytest.raises(ArithmeticError):
        compute("squares", failing, tmp_path, workers=1)
    assert (tmp_path / "squares.json").read_bytes() == before
    assert results.read(tmp_path / "squares.partial.json").seeds == [0, 1]


def test_a_failure_in_another_process_names_the_function_and_the_seed(tmp_path):
    failing = Experiment(square, {"fail_at": 1}, seeds=range(3))
    with pytest.raises(RuntimeError, match=r"square.*1.*ArithmeticError: told to fail"):
        compute("squares", failing, tmp_path, workers=2)


SLOW = """
import sys, time
from pathlib import Path

def slow(seed):
    time.sleep(0.0 if seed < 2 else 60.0)
    return {"value": seed}

if __name__ == "__main__":
    import slow_experiment
    from samkit.experiments import Experiment, compute
    experiment = Experiment(slow_experiment.slow, seeds=range(6))
    compute("slow", experiment, Path(sys.argv[1]), workers=int(sys.argv[2]))
"""


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
@pytest.mark.parametrize(("sign", "workers"), [(signal.SIGKILL, 1), (signal.SIGINT, 2)])
def test_a_killed_run_keeps_every_finished_seed(tmp_path, sign, workers):
    script = tmp_path / "slow_experiment.py"
    script.write_text(SLOW)
    child = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path), str(workers)], stderr=subprocess.PIPE, cwd=tmp_path
    )
    partial = tmp_path / "slow.partial.json"
    while child.poll() is None and not (partial.is_file() and len(results.read(partial).seeds) >= 2):
        time.sleep(0.05)
    child.send_signal(sign)
    dropped = 0
    try:
        _, errors = child.communicate(timeout=30)  # returns when the workers have let go of the pipe, too
    except subprocess.TimeoutExpired:
        # Python drops an interrupt that meets a destructor, and says so; the next one gets through.
        child.send_signal(sign)
        _, errors = child.communicate()
        dropped = 1
    assert partial.is_file(), errors.decode()
    # Two workers may finish in either order; the file is put in order when the last seed is there.
    assert sorted(results.read(partial).seeds) == [0, 1]
    if sign == signal.SIGINT:
        assert errors.decode().count("Exception ignored") == dropped
        assert errors.decode().count("Traceback") == 1 + dropped


def test_the_command_refuses_an_unknown_name_and_lists_the_known_ones(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--only", "no_such_experiment"])
    assert stop.value.code == 2
    assert "no_such_experiment" in capsys.readouterr().err


def test_the_command_lists_every_experiment(capsys):
    assert main(["--list"]) == 0
    listed = capsys.readouterr().out
    for name in experiments.collect():
        assert f"{name}:" in listed


def test_the_command_reports_a_failure_without_a_traceback(capsys, monkeypatch):
    failing = {"squares": Experiment(square, {"fail_at": 0}, seeds=range(2))}
    monkeypatch.setattr("samkit.experiments.__main__.collect", lambda: failing)
    monkeypatch.setattr("samkit.experiments.__main__.compute", _fail)
    assert main([]) == 1
    assert capsys.readouterr().err == "error: told to fail\n"


def _fail(*arguments, **options):
    raise RuntimeError("told to fail")


def test_experiments_stored_with_the_package_match_what_the_chapters_define():
    defined = experiments.collect()
    for name in results.names():
        kept = results.load(name)
        assert name in defined, f"samkit/results/{name}.json belongs to no experiment; delete it"
        assert kept.function == defined[name].function_name
        assert kept.config == json.loads(json.dumps(defined[name].config))
        assert kept.seeds == list(defined[name].seeds)


def test_every_experiment_of_the_chapters_has_stored_results():
    assert sorted(experiments.collect()) == results.names()


def test_stored_files_stay_small():
    folder = Path(results.__file__).parent
    for file in folder.glob("*.json"):
        assert file.stat().st_size < 200_000, f"{file.name} has {file.stat().st_size} bytes"


def test_loading_an_unknown_name_says_how_to_compute_it():
    with pytest.raises(ValueError, match=r"no_such_experiment.*--only no_such_experiment"):
        results.load("no_such_experiment")


def test_an_unknown_column_names_the_known_ones(tmp_path):
    compute("squares", Experiment(square, seeds=range(2)), tmp_path, workers=1)
    with pytest.raises(ValueError, match=r"'cube'.*square, powers"):
        stored(tmp_path).column("cube")


@pytest.mark.parametrize(("value", "fits"), [(0.0, True), (3.99, True), (4.01, False), (math.nan, False)])
def test_agreement_means_within_four_standard_deviations(value, fits):
    sample = np.array([-1.0, 1.0]) / math.sqrt(2)  # mean 0, standard deviation 1
    assert results.agrees(value, sample) is fits


def test_agreement_can_use_a_stated_tolerance():
    assert results.agrees(1.05, [1.0, 1.0], tolerance=0.1)
    assert not results.agrees(1.2, [1.0, 1.0], tolerance=0.1)


def test_every_number_of_a_row_must_agree():
    rows = np.array([[0.0, 5.0], [1.0, 6.0], [2.0, 7.0]])
    assert results.agrees([1.0, 6.0], rows)
    assert not results.agrees([1.0, 60.0], rows)
    with pytest.raises(ValueError, match=r"\(2,\).*\(3,\)"):
        results.agrees([1.0, 6.0, 7.0], rows)


def test_agreement_with_a_single_seed_needs_a_tolerance():
    with pytest.raises(ValueError, match="two stored seeds"):
        results.agrees(1.0, [1.0])
