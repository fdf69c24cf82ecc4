"""Faults of ListObjectsV2: pages, tokens, and keys that it does not know of yet."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from tests.support.faults.actions import Respond
from tests.support.faults.rules import Action
from tests.support.faults.wire import Response

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.faults.exchange import Exchange

_SPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
_TOKEN = "continuation-token"  # noqa: S105


class PageSize(Action):
    """List so many keys a page, whatever the client asks for."""

    def __init__(self, keys: int) -> None:
        self.keys = keys

    def request(self, exchange: Exchange) -> None:
        exchange.change(query=exchange.request.query | {"max-keys": str(self.keys)})


class EmptyPage(Action):
    """Answer a listing's first request with an empty page that says there are more."""

    def request(self, exchange: Exchange) -> Response | None:
        query = exchange.request.query
        if query.get(_TOKEN) == "empty":
            del query[_TOKEN]
            exchange.change(query=query)
            return None
        if _TOKEN in query:
            return None
        fields = {"Name": exchange.request.bucket, "Prefix": query.get("prefix", "")}
        fields |= {"KeyCount": "0", "MaxKeys": "1000", "IsTruncated": "true"}
        root = ET.Element("ListBucketResult", xmlns=_SPACE)
        for name, text in (fields | {"NextContinuationToken": "empty"}).items():
            ET.SubElement(root, name).text = text
        answer = Response(200)
        answer.headers.append(("Content-Type", "application/xml"))
        answer.replace_body(ET.tostring(root, xml_declaration=True))
        return answer


class StrangeTokens(Action):
    """Give continuation tokens that break when not escaped; refuse what was not given."""

    def __init__(self, text: str = "a+b/c==&max-keys=1 %2B%é?#") -> None:
        self.text = text
        self._real: dict[str, str] = {}

    def request(self, exchange: Exchange) -> Response | None:
        query = exchange.request.query
        if _TOKEN not in query:
            return None
        if query[_TOKEN] not in self._real:
            text = "The continuation token provided is incorrect"
            return Respond(400, "InvalidArgument", text).request(exchange)
        exchange.change(query=query | {_TOKEN: self._real[query[_TOKEN]]})
        return None

    def response(self, exchange: Exchange, response: Response) -> None:
        def rename(root: ET.Element) -> None:
            for name in ("NextContinuationToken", "ContinuationToken"):
                for element in root.iter(f"{{{_SPACE}}}{name}"):
                    made = f"{self.text}{len(self._real)}"
                    self._real[made] = element.text or ""
                    element.text = made

        edit(response, rename)


class HideKeys(Action):
    """Leave keys out of listings, as a service whose listings lag behind.

    Args:
        newest: So many of the page's latest, by LastModified.
        where: Or those for which this is true.
    """

    def __init__(self, newest: int = 0, where: Callable[[str], object] | None = None) -> None:
        self.newest, self.where = newest, where

    def response(self, exchange: Exchange, response: Response) -> None:
        edit(response, self._hide)

    def _hide(self, root: ET.Element) -> None:
        def text(entry: ET.Element, name: str) -> str:
            return entry.findtext(f"{{{_SPACE}}}{name}") or ""

        entries = root.findall(f"{{{_SPACE}}}Contents")
        late = sorted(entries, key=lambda entry: (text(entry, "LastModified"), text(entry, "Key")))
        hidden = late[len(late) - self.newest :] if self.newest else []
        for entry in entries:
            if entry in hidden or (self.where and self.where(text(entry, "Key"))):
                root.remove(entry)
        count = root.find(f"{{{_SPACE}}}KeyCount")
        if count is not None:
            count.text = str(len(root.findall(f"{{{_SPACE}}}Contents")))


def edit(response: Response, change: Callable[[ET.Element], None]) -> None:
    """Change a successful answer's XML document in place."""
    if response.status != 200:
        return
    root = ET.fromstring(b"".join(response.body))
    change(root)
    ET.register_namespace("", _SPACE)
    response.replace_body(ET.tostring(root, encoding="utf-8", xml_declaration=True))
