"""What gloo says when it fails, without the lines of its C++ in which it noticed."""

import re

_TERMINATE = re.compile(r"^terminate called after throwing an instance of 'gloo::\w+'\n", re.MULTILINE)
_WHAT = re.compile(r"^\s*what\(\):\s+(?=\[enforce fail at \S*gloo/)", re.MULTILINE)
_TOO_LONG = re.compile(
    r"\[enforce fail at \S*/pair\.cc:\d+\] op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)\.[^\n]*"
)
_PLACE = re.compile(r"\[(?:enforce fail at )?\S*gloo/\S+\.(?:cc|h):\d+\] *")


def without_gloos_places(text: str) -> str:
    """What a rank wrote, or an exception of torch's: gloo's files go, what it found stays."""
    if "gloo" not in text:
        return text
    text = _WHAT.sub("", _TERMINATE.sub("", text))
    text = _TOO_LONG.sub(r"gloo: \1 bytes arrived where \2 were expected", text)
    return _PLACE.sub("gloo: ", text)
