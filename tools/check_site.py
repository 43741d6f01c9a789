"""Checks the built site: what its search finds, headings, texts of pictures, contrast of colours.

    python tools/check_site.py site

prints what is wrong, and exits with 1. The search is asked through Node, if there is one. Colours
are those of the style sheets' variables, in the light and in the dark scheme.
"""

from __future__ import annotations

import colorsys
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

# A word that people look for, and the pages that may come first.
WORDS = {
    "custom_vjp": "guides/transformations",
    "gradient": "guides/transformations",
    "vmap": "guides/transformations",
    "shard_map": "sharding guides/transformations",
    "heuristics": "coming-from/torch-triton",
    "torch": "coming-from/torch-triton",
    "strides": "coming-from/torch-triton reference/calling",
    "pytest": "guides/testing",
    "offline": "start/install",
    "install": "start/install",
    "fp8": "eight-bits",
    "int8": "eight-bits",
    "mxfp4": "quantized-checkpoints",
    "autotune": "tuning",
    "TRIAX_AUTOTUNE": "tuning",
    "export": "serving",
    "out of bounds": "guides/debugging",
    "donate": "guides/in-place",
    "flax": "guides/flax-and-equinox guides/flax-nnx",
    "orbax": "guides/flax-nnx",
    "ragged_dot": "coming-from/argsort reference/moe moe",
    "jax.lax.ragged_dot": "coming-from/argsort reference/moe moe",
    "top_k": "router",
    "all_to_all": "expert-parallel",
    "capacity": "moe",
    "triton_call": "reference/calling",
    "notebook": "gallery",
    "doctor": "reference/command-line",
    "gluon": "guides/tma-and-gluon",
    "deepseek": "models",
    "deprecation": "versions",
    "upgrade": "versions",
    "getting started": "start/first-kernel",
    "moe": "moe",
    "oom": "moe",
    "mixtral": "models",
    "lora": "models",
    "backward": "guides/transformations",
    "primitive": "guides/transformations",
    "sharding": "sharding",
    "expert parallel": "expert-parallel parallel",
    "fsdp": "parallel",
    "multi-host": "parallel",
    "megablocks": "coming-from/argsort",
    "publish": "guides/packaging-kernels",
    "race condition": "guides/testing",
    "docker": "serving",
    "decode": "serving start/first-model",
    "tpu": "adopting/before faq",
    "deterministic": "faq",
    "safetensors": "from-a-checkpoint quantized-checkpoints",
    "kv cache": "start/first-model serving",
    "checkpoint": "from-a-checkpoint quantized-checkpoints",
    "5090": "cards",
    "A100": "cards",
    "Blackwell": "cards",
    "z_loss": "reference/moe router",
    "fuzz": "checking",
}


def search(site: Path) -> Iterator[str]:
    """Words for which another page comes first."""
    if shutil.which("node") is None:
        print("check_site: no Node here, so the search is not asked", file=sys.stderr)
        return
    command = ["node", str(Path(__file__).with_name("site_search.mjs")), str(site), *WORDS]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    for word, found in json.loads(done.stdout).items():
        pages = [place.partition("#")[0].rstrip("/") for place in found]
        if not pages or pages[0] not in WORDS[word].split():
            yield f"search: {word!r} finds {pages[:3]}, not {WORDS[word]}"


class Page(HTMLParser):
    """The levels of a page's headings, its description, and pictures without a text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.levels: list[int] = []
        self.description = ""
        self.without_text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if re.fullmatch("h[1-6]", tag):
            self.levels.append(int(tag[1]))
        elif tag == "meta" and found.get("name") == "description":
            self.description = found.get("content") or ""
        elif tag == "img" and not found.get("alt"):
            self.without_text.append(str(found.get("src")))


def pages(site: Path) -> Iterator[str]:
    """Pages with no description of their own, or a wrong heading, picture or list."""
    described: dict[str, Path] = {}
    for path in sorted(site.rglob("index.html")):
        text, name = path.read_text(encoding="utf-8"), path.parent.relative_to(site)
        page = Page(text)
        if lost := re.search(r"\n- <strong>(.*?)</strong>", text):
            yield f"{name}: {lost[1]!r} begins no item of a list: a blank line is missing before it"
        if page.levels[:1] != [1] or page.levels.count(1) > 1:
            yield f"{name}: its first heading, and no other, must be of level 1: {page.levels}"
        for above, below in zip(page.levels, page.levels[1:], strict=False):
            if below > above + 1:
                yield f"{name}: a heading of level {below} follows one of level {above}"
        if not 50 <= len(page.description) <= 160:
            yield f"{name}: its description must have 50 to 160 characters: {page.description!r}"
        elif (other := described.setdefault(page.description, name)) != name:
            yield f"{name}: its description is that of {other}"
        for source in page.without_text:
            if "logo" not in source:  # beside the site's name
                yield f"{name}: the picture {source} has no text"


Color = tuple[float, float, float, float]  # red, green, blue and alpha, from 0 to 1

# What is read, and on what.
_CODE = "number special function constant keyword string name operator punctuation comment generic"
READ = [
    *((f"--md-{name}", "--md-default-bg-color") for name in ("typeset-color", "typeset-a-color")),
    ("--md-default-fg-color--light", "--md-default-bg-color"),
    ("--md-primary-bg-color", "--md-primary-fg-color"),
    *(("--md-" + name, "--md-code-bg-color") for name in ("code-fg-color", "typeset-a-color")),
    *((f"--md-code-hl-{name}-color", "--md-code-bg-color") for name in _CODE.split()),
]


def contrast(site: Path) -> Iterator[str]:
    """Colours that are less than 4.5 : 1."""
    sheets = [*sorted(site.glob("assets/stylesheets/*.css")), site / "styles" / "extra.css"]
    text = "".join(sheet.read_text(encoding="utf-8") for sheet in sheets)
    blocks = re.findall(r"([^{}]+)\{([^{}]*)\}", re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL))
    for scheme in ("default", "slate"):
        either = [":root", f"[data-md-color-scheme={scheme}]", "[data-md-color-primary=indigo]"]
        found: dict[str, str] = {}
        for active in (set(either), {either[1] + either[2]}):  # the more specific ones win
            for selectors, body in blocks:
                if active & {part.strip().replace('"', "") for part in selectors.split(",")}:
                    found |= dict(re.findall(r"(--md-[\w-]+):\s*([^;]+)", body))
        for ink, ground in READ:
            ratio = _ratio(_color(ink, found), _color(ground, found))
            if ratio < 4.5:
                yield f"contrast: {ink} on {ground} is {ratio:.2f} in the scheme {scheme}"


def _color(value: str, found: dict[str, str]) -> Color:
    """A colour of CSS, or of a variable."""
    while value.startswith(("var(", "--")):
        value = found[value.removeprefix("var(").rstrip(")").strip()].strip()
    if value.startswith("#"):
        digits = value[1:] if len(value) > 5 else "".join(2 * digit for digit in value[1:])
        parts = [int(digits[i : i + 2], 16) / 255 for i in range(0, len(digits), 2)]
        return (*parts[:3], parts[3] if len(parts) > 3 else 1.0)
    words = value.replace("var(--md-hue)", found.get("--md-hue", "232")).replace("deg", "")
    numbers = re.findall(r"([\d.]+)(%?)", words)
    parts = [float(number) / (100 if percent else 1) for number, percent in numbers]
    alpha = parts[3] if len(parts) > 3 else 1.0
    if value.startswith("hsl"):
        return (*colorsys.hls_to_rgb(parts[0] / 360, parts[2], parts[1]), alpha)
    if value.startswith("rgb"):
        return (parts[0] / 255, parts[1] / 255, parts[2] / 255, alpha)
    raise ValueError(f"not a colour: {value}")


def _ratio(ink: Color, ground: Color) -> float:
    """WCAG's contrast of an ink on a ground."""
    mixed = [ink[3] * a + (1 - ink[3]) * b for a, b in zip(ink[:3], ground[:3], strict=True)]
    light, dark = sorted((_luminance(mixed), _luminance([*ground[:3]])), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(color: list[float]) -> float:
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in color]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def main() -> int:
    site = Path(sys.argv[1])
    wrong = [*search(site), *pages(site), *contrast(site)]
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
