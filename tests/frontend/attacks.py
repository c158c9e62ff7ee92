"""Texts of a model that would run, load, hide or break something on a page that trusted them."""

import json
from pathlib import Path

PWNED = "window.pwned=1"
ATTACKS = {
    "script": f"<script>{PWNED}</script>",
    "script in capitals": f"<SCRIPT>{PWNED}</SCRIPT>",
    "script that ends ours": f"</script><script>{PWNED}</script>",
    "nested script": f"<scr<script>ipt>{PWNED}</scr</script>ipt>",
    "image": f'<img src=x onerror="{PWNED}">',
    "svg": f'<svg onload="{PWNED}"><animate onbegin="{PWNED}"/></svg>',
    "math": f'<math><mtext><img src=x onerror="{PWNED}"></mtext></math>',
    "frame": f'<iframe srcdoc="<script>parent.{PWNED}</script>"></iframe>',
    "object": f'<object data="data:text/html,<script>{PWNED}</script>"></object>',
    "embed": f'<embed src="javascript:{PWNED}">',
    "details": f'<details open ontoggle="{PWNED}">x</details>',
    "autofocus": f'<input autofocus onfocus="{PWNED}">',
    "video": f'<video><source onerror="{PWNED}"></video>',
    "body": f'<body onload="{PWNED}">',
    "style": "<style>*{display:none}</style>",
    "link": '<link rel="stylesheet" href="http://127.0.0.1:1/x.css">',
    "base": '<base href="http://127.0.0.1:1/">',
    "meta refresh": f'<meta http-equiv="refresh" content="0;url=javascript:{PWNED}">',
    "form": f'<form action="javascript:{PWNED}"><button>b</button></form>',
    "anchor": f'<a href="javascript:{PWNED}">a</a>',
    "markdown link": f"[a](javascript:{PWNED})",
    "markdown image": f'![a](x"onerror="{PWNED})',
    "markdown reference": f"[a]\n\n[a]: javascript:{PWNED}",
    "fence": f'```html" onload="{PWNED}\n<b>\n```',
    "template literal": "${" + PWNED + "}{{constructor.constructor('" + PWNED + "')()}}",
    "comment": f"<!--><script>{PWNED}</script>-->",
    "attribute end": f"\"'><img src=x onerror={PWNED}>",
    "entities": f"&lt;script&gt;{PWNED}&lt;/script&gt;&#x3c;script>",
    "line separators": f"a\u2028<script>{PWNED}</script>\u2029b",
    "right to left": "\u202e}gnihtyreve{ \u2066<b>\u2069",
    "invisible": "a\u200b\ufeff\u2060b\U000e0041",
    "NUL and controls": "a\x00b\x1b[31mred\x07",
    "half a surrogate pair": "a\ud83d b",
    "one huge word": "x" * 70_000,
    "combining marks": "Z" + "\u0301" * 500,
    "unclosed thoughts": f"<think><img src=x onerror={PWNED}>",
    "a call that is none": f"<tool_call>{{<script>{PWNED}</script>",
    "script in JSON": f'{{"a":"<!--<script>","b":"</script><script>{PWNED}//"}}',
    "image that is a program": f"data:image/svg+xml,<svg xmlns='http://www.w3.org/2000/svg' onload='{PWNED}'/>",
    "style of an attribute": f"red;background:url(javascript:{PWNED})}}*{{display:none",
    "address with parts": f"#group=x&task=<img>&view=failures%00%22%3E%3Cscript%3E{PWNED}",
    "percent signs": "%3Cscript%3E%ff%zz%",
    "name of a prototype": "__proto__",
    "name of a constructor": "constructor",
    "name of a method": "hasOwnProperty",
    "number that is none": "NaN",
}
PROTOTYPE = {
    "__proto__": {"polluted": 1},
    "constructor": {"prototype": {"polluted": 1}},
    "hasOwnProperty": 1,
    "toString": "x",
}


def write_hostile_run(folder: Path) -> Path:
    """A rollout file and its failures with every attack in every place that a model or an environment fills."""
    path = folder / "h_rollouts_x_0001.jsonl"
    texts = list(ATTACKS.values())
    chats = [
        [
            {"role": "user", "content": "q"},
            {
                **PROTOTYPE,
                "role": "assistant",
                "name": text[:100],
                "content": [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": text[:100]}}],
                "reasoning_content": text[:2000],
                "tool_calls": [{"id": text[:50], "function": {"name": text[:100], "arguments": text[:2000]}}],
                text[:100]: text[:100],
            },
            {"role": "tool", "content": text[:2000]},
            {"role": text[:100], "content": text[:2000]},
        ]
        for text in texts
    ]
    count = len(texts)
    every = {
        "scores": [1.0] * count,
        "messages": chats,
        "verdicts": [{**PROTOTYPE, text[:99]: text[:99]} for text in texts],
    }
    ids = {"tokens": [[1, 2, 3]] * count, "masks": [[-100, 2, 3]] * count}
    groups = [{**every, **ids, **PROTOTYPE, "item_key": "0", "task": "all"}]
    groups += [
        {"scores": [0.5], "messages": [text[:2000]], "task": text[:100], "item_key": text[:100], "images": [text[:100]]}
        for text in texts
    ]
    groups[0]["unscored"] = [{"index": text[:50], "failure": text[:50], "error": text[:2000]} for text in texts]
    with path.open("w") as stream:
        for each in groups:
            stream.write(json.dumps(each) + "\n")
    failures = [
        {"class": text[:99], "error": text[:99], "traceback": text[:999], "item_key": text[:9]} for text in texts
    ]
    path.with_name("failures.jsonl").write_text("".join(json.dumps(each) + "\n" for each in failures))
    return path
