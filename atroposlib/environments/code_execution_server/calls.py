"""Runs inside the sandbox: calls a function of main.py, or lets a check call one. Never imported.

    calls.py call NAME         each line of calls.txt is the source of a tuple of arguments
    calls.py record NAME       the check in main.py calls NAME; its arguments become lines
    calls.py replay NAME       the check calls a function that gives the results in results.jsonl for these arguments

Writes one JSON object a line: `begun` before a call, then what came of it. What the program prints goes to stderr.
"""

import ast
import json
import os
import random
import sys

sys.set_int_max_str_digits(0)
OUT = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)


def write(**fact):
    OUT.write(json.dumps(fact) + "\n")


def as_json(value):
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        return None


def load() -> dict:
    namespace: dict = {"__name__": "solution"}
    with open("main.py", encoding="utf-8") as source:
        exec(compile(source.read(), "main.py", "exec"), namespace)
    return namespace


def call(name):
    with open("calls.txt", encoding="utf-8") as source:
        lines = source.read().splitlines()
    function = load()[name]
    for number, line in enumerate(lines):
        arguments = ast.literal_eval(line)
        write(begun=number)
        try:
            value = function(*arguments)
            write(number=number, json=as_json(value), repr=repr(value))
        except MemoryError:
            write(number=number, memory=True)
        except BaseException as error:
            write(number=number, error=f"{type(error).__name__}: {error}"[:500])


def record(name):
    namespace = load()

    def recorded(*arguments):
        write(arguments=repr(arguments))
        return namespace[name](*arguments)

    random.seed(0)
    namespace["check"](recorded)


def replay(name):
    with open("results.jsonl", encoding="utf-8") as source:
        results = [json.loads(line) for line in source]
    results.reverse()

    def replayed(*arguments):
        if not results:
            raise AssertionError("the check calls the function more often than with the right answers")
        result = results.pop()
        if result["arguments"] != repr(arguments):
            raise AssertionError("the check calls the function otherwise than with the right answers")
        if "error" in result:
            raise RuntimeError(result["error"])
        return ast.literal_eval(result["repr"])

    random.seed(0)
    load()["check"](replayed)
    write(passed=True)


{"call": call, "record": record, "replay": replay}[sys.argv[1]](sys.argv[2])
