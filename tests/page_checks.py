"""Check a page of a report: valid, self-contained and accessible."""

import re
from html.parser import HTMLParser

VOID = {"meta", "br", "input", "link", "wbr"}


class Page(HTMLParser):
    """Parse a page, and collect its problems."""

    def __init__(self):
        super().__init__()
        self.open, self.problems = [], []
        self.ids, self.references, self.labels, self.controls = [], [], [], []
        self.headings, self.links, self.sources = [], [], []
        self.scripts, self.text, self.policy = [], [], ""
        self._tables = []

    def handle_starttag(self, tag, pairs):
        attributes = dict(pairs)
        if tag not in VOID:
            self.open.append(tag)
        self.ids += [attributes["id"]] if "id" in attributes else []
        for name in ("aria-labelledby", "aria-describedby"):
            self.references += attributes.get(name, "").split()
        self.references += [attributes["for"]] if "for" in attributes else []
        self.labels += [attributes["for"]] if tag == "label" else []
        self.controls += [attributes.get("id")] if tag in {"input", "select"} else []
        self.headings += [int(tag[1])] if re.fullmatch("h[1-6]", tag) else []
        self.links += [attributes["href"]] if "href" in attributes else []
        self.sources += [
            attributes[name] for name in ("src", "srcset", "data") if name in attributes
        ]
        if attributes.get("http-equiv") == "Content-Security-Policy":
            self.policy = attributes["content"]
        if tag == "table":
            self._tables.append(False)
        elif tag == "caption":
            self._tables[-1] = True
        elif tag == "th" and attributes.get("scope") not in {"row", "col", "colgroup"}:
            self.problems.append("a header without scope")
        elif tag == "svg":
            self.problems.append("a drawing in the page, which the script should create")
        for name in attributes:
            if name.startswith("on") or name == "style":
                self.problems.append(f"{name} in <{tag}>, which the policy forbids")

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        opened = self.open.pop()
        assert opened == tag, f"</{tag}> closes <{opened}>, at {self.getpos()}"
        if tag == "table" and not self._tables.pop():
            self.problems.append("a table without a caption")

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif self.open and self.open[-1] != "style":
            self.text.append(data)


def check_page(text, elsewhere=()):
    """Assert that a page has no problems, and only these external links; return it parsed."""
    page = Page()
    page.feed(text)
    page.close()
    assert page.open == []
    assert page.problems == []
    assert len(page.ids) == len(set(page.ids)), "an id twice"
    assert set(page.references) <= set(page.ids), "a reference to nothing"
    assert set(page.controls) <= set(page.labels), "a control without a label"
    assert page.headings[:1] == [1]
    assert page.headings.count(1) == 1
    steps = [
        after - before for before, after in zip(page.headings, page.headings[1:], strict=False)
    ]
    assert all(step <= 1 for step in steps), f"headings skip a level: {page.headings}"
    assert page.sources == [], "it would load something"
    anchors = [link[1:] for link in page.links if link.startswith("#")]
    assert set(anchors) <= set(page.ids), "a link to nothing"
    assert {link for link in page.links if re.match(r"[a-z]+:|//", link)} == {*elsewhere}
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    assert page.policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in page.policy
    # The parser must see each script element: the JSON data, and the page's script.
    assert len(page.scripts) == len(re.findall("<script", text))
    assert len(text.encode()) < 1_000_000
    return page
