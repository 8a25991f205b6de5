"""Tests of what needs no package: `python3 -m unittest discover -s benches/peers`."""

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import compare
import minilm
import plot
from harness import environment
from harness.cases import CASES, Case, select
from harness.environment import SetupError
from harness.pace import Pace
from harness.table import SLOW, Answer, Row, Table, best_answer, number, short

TOLERANCE = 1e-5


def answer(ms: float, error: float = 1e-7, variant: str = "plain") -> Answer:
    return Answer(variant, 99.0, error, TOLERANCE, [ms])


def row(**answers: Answer | None) -> Row:
    return Row("tiny/x", "f32", "highest", 1, "avx2", 6e6, answers)


class Cases(unittest.TestCase):
    def test_ids_are_unique_and_start_with_the_kind(self) -> None:
        ids = [case.id for case in CASES]
        self.assertEqual(len(ids), len(set(ids)))
        self.assertTrue(all(case.id.startswith(f"{case.kind}/") for case in CASES))

    def test_id(self) -> None:
        grouped = Case("decode", 1, 32, 8, 1, 4096, 128)
        self.assertEqual(grouped.id, "decode/b1_h32_kv8_q1_k4096_d128")
        masked = Case("masked", 2, 4, 4, 8, 8, 16, causal=True, mask="key")
        self.assertEqual(masked.id, "masked/b2_h4_q8_k8_d16_causal_keymask")

    def test_select(self) -> None:
        self.assertEqual(select(""), list(CASES))
        self.assertEqual([case.kind for case in select("^tiny/")], ["tiny"])
        self.assertEqual([case.source for case in select("minilm")], ["minilm"])

    def test_no_match_names_the_kinds(self) -> None:
        with self.assertRaisesRegex(ValueError, "'nothing' matches no case; kinds are prefill, gqa"):
            select("nothing")
        with self.assertRaisesRegex(ValueError, "not a regular expression"):
            select("(")

    def test_bytes_depend_on_kv_heads_and_dtype(self) -> None:
        case = Case("decode", 1, 32, 8, 1, 4096, 128)
        self.assertEqual(case.kv_bytes("f32"), 2 * 8 * 4096 * 128 * 4)
        self.assertEqual(case.kv_bytes("bf16") * 2, case.kv_bytes("f32"))


class Results(unittest.TestCase):
    def test_best_answer_of_a_peer_is_right_before_it_is_fast(self) -> None:
        wrong, slow, fast = answer(1.0, 0.5), answer(3.0), answer(2.0, variant="fused")
        self.assertIs(best_answer([wrong, slow, fast]), fast)
        self.assertIs(best_answer([wrong]), wrong)
        self.assertIsNone(best_answer([]))

    def test_first_call_counts_only_alone(self) -> None:
        self.assertEqual(Answer("plain", 9.0, 0.0, TOLERANCE).median_ms, 9.0)
        self.assertEqual(Answer("plain", 9.0, 0.0, TOLERANCE, [1.0, 2.0, 7.0]).median_ms, 2.0)

    def test_ratio_is_to_the_best_right_peer(self) -> None:
        result = row(ours=answer(2.0), torch=answer(5.0), rten=answer(4.0), numpy=answer(1.0, 0.1), candle=None)
        self.assertEqual((result.best_peer, result.ratio), ("rten", 2.0))
        self.assertEqual(result.gflops, 3.0)
        self.assertEqual(result.wrong(), ["numpy"])

    def test_not_a_number_is_wrong(self) -> None:
        self.assertFalse(answer(1.0, float("inf")).right)
        self.assertFalse(answer(1.0, float("nan")).right)

    def test_no_ratio_without_a_right_answer_on_both_sides(self) -> None:
        self.assertIsNone(row(ours=answer(2.0, 0.1), torch=answer(5.0)).ratio)
        self.assertIsNone(row(ours=answer(2.0), torch=answer(5.0, 0.1)).ratio)
        self.assertIsNone(row(torch=answer(5.0)).ratio)
        self.assertIsNone(row(ours=None, torch=answer(5.0)).ratio)

    def test_json(self) -> None:
        result = json.loads(
            row(ours=answer(2.0), torch=answer(5.0), rten=None, numpy=answer(1.0, float("inf"))).to_json()
        )
        self.assertEqual(result["peers"], {"torch": 5.0, "rten": None, "numpy": 1.0})
        self.assertEqual((result["ours_ms"], result["best_peer"], result["ratio"]), (2.0, "torch", 2.5))
        self.assertEqual(result["error"], {"ours": 1e-7, "torch": 1e-7, "rten": None, "numpy": "inf"})
        self.assertEqual(result["wrong"], ["numpy"])


class Guesses(unittest.TestCase):
    small, large = (Case("prefill", 1, 8, 8, seqlen, seqlen, 64) for seqlen in (512, 1024))
    causal = Case("prefill", 1, 8, 8, 512, 512, 64, causal=True)

    def test_guess_grows_with_the_work(self) -> None:
        pace = Pace()
        self.assertIsNone(pace.guess(("torch",), self.small, 1))
        pace.learn(("torch",), self.small, 1, 5.0)
        self.assertAlmostEqual(pace.guess(("torch",), self.large, 1), 20.0)
        self.assertIsNone(pace.guess(("rten",), self.large, 1))

    def test_same_kind_counts_before_others(self) -> None:
        pace = Pace()
        pace.learn(("torch",), self.small, 1, 5.0)
        self.assertAlmostEqual(pace.guess(("torch",), self.causal, 1), 5.0)
        pace.learn(("torch",), self.causal, 1, 3.0)
        self.assertAlmostEqual(pace.guess(("torch",), self.causal, 1), 3.0)
        self.assertAlmostEqual(pace.guess(("torch",), self.small, 1), 5.0)

    def test_fewer_threads_bound_more(self) -> None:
        pace = Pace()
        pace.learn(("torch",), self.small, 1, 5.0)
        pace.learn(("torch",), self.small, 2, 50.0)
        self.assertAlmostEqual(pace.guess(("torch",), self.small, 2), 5.0)
        pace.learn(("torch",), self.small, 2, 2.5)
        self.assertAlmostEqual(pace.guess(("torch",), self.small, 2), 2.5)
        self.assertAlmostEqual(pace.guess(("torch",), self.small, 1), 5.0)


class Formatting(unittest.TestCase):
    def test_numbers(self) -> None:
        self.assertEqual(
            [number(x) for x in (0.01234, 0.5, 7.891, 9.999, 42.42, 1234.5)],
            ["0.0123", "0.500", "7.89", "10.0", "42.4", "1230"],
        )
        self.assertEqual([short(x) for x in (1.2e-7, 0.0, 3.0, float("inf"))], ["1e-7", "0", "3", "inf"])

    def test_columns_line_up(self) -> None:
        table = Table(["ours", "torch", "rten", "numpy"], ["tiny/x"], show_precision=False)
        result = row(ours=answer(2.0), torch=answer(5.0, 0.1), rten=None, numpy=None)
        result.notes["numpy"] = SLOW
        header, line = table.header(), table.row(result)
        self.assertEqual(len(header), len(line))
        for title, cell in (("ours", "2.00 1e-7"), ("torch", "WRONG 5.00 1e-1"), ("rten", "-"), ("numpy", "slow")):
            self.assertTrue(line[: header.index(title) + len(title)].endswith(cell), (title, line))

    def test_precision_is_shown_if_there_are_several(self) -> None:
        table = Table(["ours"], ["tiny/x"], show_precision=True)
        self.assertIn("highest", table.row(row(ours=answer(2.0))))
        self.assertIn("precision", table.header())


class Flags(unittest.TestCase):
    def fails(self, *arguments: str, parse=compare.parse) -> str:
        """The message that these arguments end with: one line, status 2."""
        errors = io.StringIO()
        with contextlib.redirect_stderr(errors), self.assertRaises(SystemExit) as end:
            parse(list(arguments))
        self.assertEqual(end.exception.code, 2)
        message = errors.getvalue()
        self.assertEqual(message.count("\n"), 1, message)
        return message

    def test_defaults(self) -> None:
        options = compare.parse([])
        self.assertEqual((options.dtypes, options.threads, options.precision), (["f32"], [1], ["highest"]))
        self.assertEqual(options.cases, list(CASES))
        self.assertNotIn("jax", options.peers)

    def test_lists(self) -> None:
        options = compare.parse(["--dtypes", "bf16,f32,bf16", "--peers", "ours,numpy", "--cases", "tiny"])
        self.assertEqual((options.dtypes, options.peers, len(options.cases)), (["bf16", "f32"], ["ours", "numpy"], 1))

    def test_unknown_values(self) -> None:
        self.assertIn("matches no case", self.fails("--cases", "nothing"))
        self.assertIn("f64 is not of f32, bf16, f16", self.fails("--dtypes", "f32,f64"))
        self.assertIn("tensorflow is not of ours, torch", self.fails("--peers", "tensorflow"))
        self.assertIn("lowest is not of highest", self.fails("--precision", "lowest"))
        self.assertIn("nothing is not of", self.fails("--dtypes", ""))
        self.assertIn("unrecognized arguments: --fast", self.fails("--fast"))

    def test_numbers_out_of_range(self) -> None:
        beyond = str(len(os.sched_getaffinity(0)) + 1)
        self.assertIn("cores this process may use", self.fails("--threads", beyond))
        self.assertIn("cores this process may use", self.fails("--threads", "0"))
        self.assertIn("not a list of numbers", self.fails("--threads", "two"))
        for seconds in ("0", "-1", "nan", "inf", "soon"):
            self.assertIn("not a positive number", self.fails("--seconds", seconds))
        self.assertIn("not a list of lengths", self.fails("--seqlens", "12,x", parse=plot.parse))

    def test_list_needs_nothing(self) -> None:
        command = [sys.executable, "-S", str(Path(compare.__file__)), "--list", "--cases", "^bert/"]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        self.assertEqual(run.stdout, "bert/b8_h12_q128_k128_d64\n")


class Setup(unittest.TestCase):
    def setUp(self) -> None:
        self.directory = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.enterContext(mock.patch.dict(os.environ, {"POLYHEAD_PEERS_DIR": str(self.directory)}))
        self.enterContext(contextlib.redirect_stderr(io.StringIO()))

    def test_only_what_the_peers_need(self) -> None:
        self.assertEqual(environment.packages(["numpy"]), ["numpy"])
        self.assertEqual(environment.packages(["ours", "candle"]), ["numpy"])
        self.assertEqual(environment.packages(["rten", "onnxruntime"]), ["numpy", "onnx", "onnxruntime"])
        self.assertEqual(environment.build_runners(["numpy", "torch"]), {})

    def test_a_failing_step_is_one_line(self) -> None:
        command = [sys.executable, "-c", "print('working'); print('ERROR: no such thing'); raise SystemExit(3)"]
        with self.assertRaisesRegex(SetupError, "^cannot: ERROR: no such thing") as failure:
            environment.run_step(command, self.directory / "log", "cannot")
        self.assertNotIn("\n", str(failure.exception))
        with self.assertRaisesRegex(SetupError, "there is no no-such-program"):
            environment.run_step(["no-such-program"], self.directory / "log", "cannot")

    def test_an_unfinished_environment_is_made_again(self) -> None:
        (self.directory / "venv").mkdir()
        commands = []

        def step(command: list[str], *_: object) -> None:
            commands.append(command)
            (self.directory / "venv/bin").mkdir(exist_ok=True)
            (self.directory / "venv/bin/python").touch()

        with mock.patch.object(environment, "run_step", step):
            environment.ensure_venv(["numpy"])
            environment.ensure_venv(["numpy"])
        self.assertEqual(["venv" in command for command in commands], [True, False])
        self.assertIn(f"numpy=={environment.PINS['numpy']}", commands[1])

    def test_workers_have_their_threads_and_no_kernel_override(self) -> None:
        with mock.patch.dict(os.environ, {"OPENBLAS_CORETYPE": "Zen", "POLYHEAD_MAX_LEVEL": ""}):
            variables = environment.worker_env(2)
        self.assertNotIn("OPENBLAS_CORETYPE", variables)
        self.assertEqual({variables[f"{name}_NUM_THREADS"] for name in ("OMP", "RAYON", "RTEN")}, {"2"})
        with mock.patch.dict(os.environ, {"POLYHEAD_MAX_LEVEL": "avx2"}):
            self.assertEqual(environment.worker_env(1)["ATEN_CPU_CAPABILITY"], "avx2")


class MiniLm(unittest.TestCase):
    def test_batches_have_all_sentences_and_one_size(self) -> None:
        self.assertEqual(minilm.batches(["a", "b", "c"], 1), [["a"], ["b"], ["c"]])
        self.assertEqual(minilm.batches(["a", "b", "c"], 2), [["a", "b"], ["c", "a"]])
        self.assertEqual(minilm.batches(["a", "b", "c"], 5), [["a", "b", "c", "a", "b"]])

    def test_wrong_options_are_one_line(self) -> None:
        with mock.patch.dict(os.environ):
            os.environ.pop("POLYHEAD_MINILM", None)
            for wrong in ([], ["--model", "m", "--batch", "0"], ["--model", "m", "--turns", "0"]):
                errors = io.StringIO()
                with contextlib.redirect_stderr(errors), self.assertRaises(SystemExit) as end:
                    minilm.parse(wrong)
                self.assertEqual(end.exception.code, 2)
                self.assertEqual(errors.getvalue().count("\n"), 1, errors.getvalue())


if __name__ == "__main__":
    unittest.main()
