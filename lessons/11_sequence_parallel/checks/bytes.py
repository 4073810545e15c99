"""What a rank keeps of a block, counted."""

from grader.checks import Trial, check, exercise
from nanogpt.model import GPTConfig

exercise(
    "block_activation_bytes",
    world_sizes=(1,),
    distributed=False,
    hints=(
        "Go along one block and ask of each operation what its backward needs: a norm its input and two "
        "numbers a "
        "token; a linear layer its input; a GELU its input; a dropout its mask.",
        "Between c_attn and c_proj, and between c_fc and c_proj, everything has 1/n of the features, in "
        "all three "
        "schemes. What differs is what has all features: (b, s, h) or (b, s/n, h).",
        "In fp32 without dropout, in units of the whole stream S = 4·b·s·h: tensor parallel 4 + 12/n, "
        "sequence "
        "parallel 2 + 14/n, gathered again 16/n; and small terms for norms and the log-sum-exp. Dropout: two "
        "masks, and the core of lesson 01 that keeps (s, s) matrices.",
    ),
)

SCHEMES = ("tensor_parallel", "sequence_parallel", "gather_again")


def expected_bytes(config: GPTConfig, b: int, s: int, n: int, scheme: str) -> int:
    """One block's bytes on one rank, in numbers of four bytes: term by term."""
    h, a = config.n_embd, config.n_head
    stream_tokens = b * s if scheme == "tensor_parallel" else b * s // n
    read_tokens = b * s // n if scheme == "gather_again" else b * s
    numbers = 2 * (stream_tokens * h + 2 * stream_tokens)  # norms
    numbers += 2 * read_tokens * h  # what c_attn and c_fc read
    numbers += (4 + 8) * b * s * h // n  # q, k, v, out; GELU's input and output
    if config.dropout:
        numbers += 2 * stream_tokens * h + 3 * b * a * s * s // n
    else:
        numbers += b * a * s // n
    return 4 * numbers


def bytes_probe(rank, cases: list) -> list:
    return [rank.submission.block_activation_bytes(GPTConfig(**config), *rest) for config, *rest in cases]


def drawn_cases(trial: Trial, dropout: float) -> list[tuple]:
    cases = []
    for n in (1, 2, 3, 4, 8):
        a = 2 * n * trial.integer(2, 3)  # not 4: a token's numbers of the norms would be as many
        config = {
            "block_size": 2040,  # divisible by every n
            "vocab_size": 64,
            "n_layer": trial.integer(1, 3),
            "n_head": a,
            "n_embd": a * trial.choice([8, 24]),
            "dropout": dropout,
            "bias": trial.choice([True, False]),
        }
        shape = (trial.integer(2, 5), n * trial.integer(3, 40))
        cases += [(config, *shape, n, scheme) for scheme in SCHEMES]
    return cases


def compare_cases(trial: Trial, cases: list[tuple], help: str) -> None:
    (answers,) = trial.run(bytes_probe, cases)
    asked = [(GPTConfig(**config), *rest) for config, *rest in cases]
    wrong = [(case, got) for case, got in zip(asked, answers, strict=True) if got != expected_bytes(*case)]
    if not wrong:
        return
    (config, b, s, n, scheme), answer = wrong[0]
    told = f"b={b}, s={s}, h={config.n_embd}, a={config.n_head}, n={n}, dropout={config.dropout}, {scheme!r}"
    got = f"{answer:,}" if isinstance(answer, int | float) else repr(answer)
    trial.wrong(
        f"{told}: expected {expected_bytes(*wrong[0][0]):,} bytes, got {got}",
        help=help,
        cause=next(
            (cause for cause in likely(*wrong[0]) if all(cause in likely(*each) for each in wrong[1:])), ""
        ),
    )


def likely(case: tuple[GPTConfig, int, int, int, str], answer: object) -> list[str]:
    """What the answer would have been right for: all that fits, the likeliest first."""
    if not isinstance(answer, int | float):
        return []
    config, b, s, n, scheme = case
    right, found = expected_bytes(*case), []
    for other in SCHEMES:
        if other != scheme and answer == expected_bytes(config, b, s, n, other):
            found.append(f"that is what {other!r} keeps")
    if answer == expected_bytes(config, b, s, 1, scheme):
        found.append("that is the dense block: nothing is divided by the number of ranks")
    if answer == expected_bytes(config, b, config.block_size, n, scheme):
        found.append("that is for sequences of block_size: those that are given may be shorter")
    if answer * config.n_layer and answer == config.n_layer * right:
        found.append("that is all blocks: one is asked for")
    found += [told for told, size in differences(*case).items() if answer - right == size]
    whole = 4 * b * s * config.n_embd
    stream = whole if scheme == "tensor_parallel" else whole // n
    for share, size in (("the stream", stream), ("b·s·h", whole), ("b·s·h/n", whole // n)):
        count = (answer - right) / size
        if count == int(count) and 0 < abs(count) <= 8:
            tensors = "one tensor" if abs(count) == 1 else f"{abs(int(count))} tensors"
            found.append(f"{tensors} of {share} too {'many' if count > 0 else 'few'}")
    if answer == 2 * right:
        found.append("twice as much: fp32 has 4 bytes")
    return found


def differences(config: GPTConfig, b: int, s: int, n: int, scheme: str) -> dict[str, int]:
    """Cause → the bytes that it gives too many, or with a minus too few."""
    h, a = config.n_embd, config.n_head
    cut = scheme != "tensor_parallel"
    tokens = b * s // n if cut else b * s  # of the stream
    norm, head_numbers, cores = 4 * tokens * (h + 2), 4 * b * a * s // n, 3 * b * a * s * s // n
    of_each = "each of which keeps its input, a mean and a deviation a token"
    found = {
        f"one norm is missing: a block has two, {of_each}": -norm,
        f"both norms are missing, {of_each}": -2 * norm,
        "the norms' means and deviations are missing: two numbers a token and norm": -4 * 4 * tokens,
        "a norm keeps a mean and a deviation for each token: one of them is missing": -4 * 2 * tokens,
        "masks are fp32 on the CPU: 4 bytes an element, not one": -6 * tokens * h,
        "masks are fp32 on the CPU, the core's too: 4 bytes an element, not one": -6 * tokens * h - cores,
        "these are numbers, not bytes: one of fp32 has 4": -3 * expected_bytes(config, b, s, n, scheme) // 4,
    }
    if cut:
        told = "the norms' means and deviations are counted for all tokens: a norm has two for each it sees"
        found[told] = 4 * 4 * (b * s - tokens)
    if cut and config.dropout:
        told = "the two masks are counted for all tokens: a dropout masks the tokens that it sees"
        found[told] = 2 * 4 * h * (b * s - tokens)
    if cut and not config.dropout:
        told = "the log-sum-exp is counted for this rank's tokens: its heads attend for all of them"
        found[told] = 4 * a // n * (tokens - b * s)
    if config.dropout:
        told = "a log-sum-exp is counted: with dropout there is no fused kernel to keep it"
        found[told] = head_numbers
        told = "the core is counted as without dropout: a log-sum-exp, and no (s, s) matrices"
        found[told] = head_numbers - 4 * cores
    else:
        found |= {
            "the log-sum-exp is one number a token: it is one a token and head of this rank, a/n of them": (
                -4 * b * s * (a // n - 1)
            ),
            "the core's log-sum-exp is missing: a number a token and head": -head_numbers,
            "the log-sum-exp of all heads: a rank has it for its own, a/n of them": (
                4 * b * a * s - head_numbers
            ),
        }
    return found


@check("block_activation_bytes")
def bytes_without_dropout(trial: Trial) -> None:
    """Without dropout: what each of the three schemes keeps, to the byte, for n from 1 to 8."""
    compare_cases(
        trial,
        drawn_cases(trial, 0.0),
        "Count by hand for one block: norms, what c_attn and c_fc read, q, k, v, out, log-sum-exp, and "
        "the MLP.",
    )


@check("block_activation_bytes")
def bytes_with_dropout(trial: Trial) -> None:
    """With dropout: two masks of the stream, and the attention core that keeps its matrices, by heads."""
    compare_cases(
        trial,
        drawn_cases(trial, trial.choice([0.1, 0.5])),
        "A mask has the tokens of the stream. The core keeps scaled q and k, v, out, and three (b, a/n, "
        "s, s).",
    )


def words_probe(rank, config: dict, numbers: list[int]) -> list[str]:
    return [outcome_of_a_word(rank, GPTConfig(**config), num_ranks) for num_ranks in numbers]


def outcome_of_a_word(rank, config: GPTConfig, num_ranks: int) -> str:
    """On a rank: how a call with a scheme that there is not ends."""
    try:
        rank.submission.block_activation_bytes(config, 2, 8, num_ranks, "ring")
    except ValueError:
        return "ValueError"
    except NotImplementedError:
        raise
    except Exception as error:
        return type(error).__name__
    return "no error"


@check("block_activation_bytes")
def another_word_is_refused(trial: Trial) -> None:
    """Another scheme's name is a ValueError."""
    config = {"block_size": 8, "vocab_size": 8, "n_layer": 1, "n_head": 4, "n_embd": 8}
    (came,) = trial.run(words_probe, config, [2, 1])
    trial.require(came[0] == "ValueError", f"scheme='ring': expected a ValueError, got {came[0]}")
    trial.require(
        came[1] == "ValueError",
        f"scheme='ring' with num_ranks=1: expected a ValueError, got {came[1]}",
        help="Look at the scheme before the number of ranks: one rank alone knows no more schemes.",
    )
