import pytest

from benchmarks import bench_engine


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--help"], 0, "usage: python -m benchmarks.bench_engine"),
        ([], 2, "the following arguments are required: URL"),
        (["http://127.0.0.1:9004", "first"], 2, "argument PID: invalid int value: 'first'"),
    ],
)
def test_the_bench_says_how_it_is_called(capsys, arguments, code, words):
    with pytest.raises(SystemExit) as ended:
        bench_engine.main(arguments)
    said = capsys.readouterr()
    assert ended.value.code == code
    assert words in said.out + said.err
