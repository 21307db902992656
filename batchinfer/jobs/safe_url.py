"""Requests to addresses that strangers chose: only to the public internet, checked at the moment of each connection.

A name is resolved once; every address it has must be public, and the connection goes to one of the checked addresses,
so that a name cannot point elsewhere between the check and the use. Redirects pass the same transport, hence the same
check.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import TYPE_CHECKING, TypeAlias

import httpx

from batchinfer.errors import InvalidSpecError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

IpAddress: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
IpNetwork: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network
Resolve: TypeAlias = "Callable[[str, int], Sequence[IpAddress]]"

MAX_URL_LENGTH = 2048
MAX_REDIRECTS = 3
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_BLOCKED: tuple[IpNetwork, ...] = (
    # the platform's agent inside Azure's machines: a public address that is not the internet
    ipaddress.ip_network("168.63.129.16/32"),
    # protocol assignments, where another cloud keeps its metadata service
    ipaddress.ip_network("192.0.0.0/24"),
    # NAT64 with a local prefix leads into the local network
    ipaddress.ip_network("64:ff9b:1::/48"),
)


class UnsafeUrlError(InvalidSpecError):
    """A URL that must not be asked for."""

    code = "unsafe_url"


def resolve(host: str, port: int) -> list[IpAddress]:
    """All addresses of a name, as the system resolves it. Raises UnsafeUrlError if it has none."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise UnsafeUrlError(f"the host {host!r} cannot be resolved", param="url") from None
    # an IPv6 address may carry a zone, which is another way to say "of this link"
    return list(dict.fromkeys(ipaddress.ip_address(str(address[0]).partition("%")[0]) for *_, address in found))


def is_public(address: IpAddress) -> bool:
    """Whether an address belongs to the internet, also when it is IPv4 dressed as IPv6."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
        if address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
        if inner is not None:
            return is_public(inner)
        # ::a.b.c.d, long out of use, and still understood
        if int(address) >> 32 == 0:
            return False
    if address.is_multicast or address.is_reserved or any(address in network for network in _BLOCKED):
        return False
    return address.is_global


def check_url(
    url: str,
    *,
    allowed: Sequence[IpNetwork] = (),
    schemes: Sequence[str] = ("https", "http"),
    resolve: Resolve = resolve,
) -> list[IpAddress]:
    """Check a URL before it is stored; return the addresses that it may be asked at.

    ``allowed`` are networks that count as public, for receivers in one's own house.

    Raises:
        UnsafeUrlError: another scheme, a name and password in it, no host, or an address that is not public.
    """
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, TypeError, ValueError) as error:
        raise UnsafeUrlError(f"{url[:100]!r} is not a URL: {error}", param="url") from None
    if len(url) > MAX_URL_LENGTH:
        raise UnsafeUrlError(f"the URL is longer than {MAX_URL_LENGTH} characters", param="url")
    if parsed.scheme not in schemes or not parsed.host:
        raise UnsafeUrlError(
            f"{url[:100]!r} does not begin with {' or '.join(f'{s}://' for s in schemes)}host", param="url"
        )
    if not 0 < _port(parsed) < 65536:
        raise UnsafeUrlError(f"{url[:100]!r} has no port from 1 to 65535", param="url")
    if parsed.userinfo:
        raise UnsafeUrlError("a URL with a name or password in it would end in logs; leave them out", param="url")
    return _check_host(parsed.host, _port(parsed), allowed, resolve)


def _port(url: httpx.URL) -> int:
    return url.port or (443 if url.scheme == "https" else 80)


def _check_host(host: str, port: int, allowed: Sequence[IpNetwork], resolve: Resolve) -> list[IpAddress]:
    addresses = list(resolve(host, port))
    if not addresses:
        raise UnsafeUrlError(f"the host {host!r} cannot be resolved", param="url")
    for address in addresses:
        if not is_public(address) and not any(address in network for network in allowed):
            raise UnsafeUrlError(
                f"the host {host!r} is {address}, which is not an address of the public internet", param="url"
            )
    return addresses


class SafeTransport(httpx.BaseTransport):
    """Sends requests to public addresses only. Raises UnsafeUrlError for others, also after a redirect."""

    def __init__(
        self,
        *,
        allowed: Sequence[IpNetwork] = (),
        schemes: Sequence[str] = ("https", "http"),
        resolve: Resolve = resolve,
        inner: httpx.BaseTransport | None = None,
    ) -> None:
        self._allowed = tuple(allowed)
        self._schemes = tuple(schemes)
        self._resolve = resolve
        # no connection is kept: it would be found again by its address, which two names may share
        self._inner = inner or httpx.HTTPTransport(limits=httpx.Limits(max_keepalive_connections=0), trust_env=False)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Check, then connect to what was checked, under the name that was asked for."""
        host = request.url.host
        addresses = check_url(str(request.url), allowed=self._allowed, schemes=self._schemes, resolve=self._resolve)
        # the certificate must be the name's
        extensions = {**request.extensions, "sni_hostname": host}
        for address in addresses[:-1]:
            try:
                return self._inner.handle_request(_pinned(request, address, extensions))
            except httpx.ConnectError:
                continue
        return self._inner.handle_request(_pinned(request, addresses[-1], extensions))

    def close(self) -> None:
        """Close the connections."""
        self._inner.close()


def _pinned(request: httpx.Request, address: IpAddress, extensions: dict[str, object]) -> httpx.Request:
    # the Host header stays: it was written when the request was made
    return httpx.Request(
        request.method,
        request.url.copy_with(host=str(address)),
        headers=request.headers,
        stream=request.stream,
        extensions=extensions,
    )


def safe_client(
    *,
    timeout_seconds: float,
    allowed: Sequence[IpNetwork] = (),
    schemes: Sequence[str] = ("https", "http"),
    follow_redirects: bool = False,
) -> httpx.Client:
    """A client that reaches public addresses only. The environment's proxies are not asked: they would resolve names anew."""
    return httpx.Client(
        transport=SafeTransport(allowed=allowed, schemes=schemes),
        timeout=timeout_seconds,
        trust_env=False,
        follow_redirects=follow_redirects,
        max_redirects=MAX_REDIRECTS,
    )
