"""Attacks on what asks for URLs that strangers chose."""

import ipaddress
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.jobs.safe_url import SafeTransport, UnsafeUrlError, check_url, is_public, safe_client

LOOPBACK = (ipaddress.ip_network("127.0.0.0/8"),)


def names(**table):
    """A resolver with these names and no others."""
    return lambda host, _port: [ipaddress.ip_address(text) for text in table.get(host.replace(".", "_"), [])]


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.255.0.9", "0.0.0.0", "10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1",
        "169.254.169.254", "169.254.170.2", "100.64.0.1", "100.100.100.200", "168.63.129.16", "192.0.0.192",
        "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255",
        "::", "::1", "fe80::1", "fc00::1", "fd00:ec2::254", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1",
        "::ffff:169.254.169.254", "::127.0.0.1", "64:ff9b::10.0.0.1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::1",
        "2002:7f00:1::", "2002:a9fe:a9fe::1", "2001:0:4136:e378:8000:63bf:80ff:fffe", "2001:db8::1",
    ],
)  # fmt: skip
def test_addresses_that_are_not_the_internet(address):
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "address", ["1.1.1.1", "93.184.216.34", "2606:4700::1111", "::ffff:1.1.1.1", "64:ff9b::1.1.1.1"]
)
def test_addresses_of_the_internet(address):
    assert is_public(ipaddress.ip_address(address))


@given(st.ip_addresses(v=4))
def test_an_address_dressed_as_ipv6_is_judged_as_itself(address):
    for dress in (f"::ffff:{address}", f"64:ff9b::{address}"):
        assert is_public(ipaddress.ip_address(dress)) == is_public(address)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/", "http://localhost/", "http://[::1]/", "http://2130706433/", "http://0x7f000001/",
        "http://0177.0.0.1/", "http://127.1/", "http://0/", "http://[::ffff:127.0.0.1]/", "http://[fe80::1%25lo]/",
        "http://169.254.169.254/latest/meta-data/", "http://\uff11\uff12\uff17.0.0.1/", "http://127.0.0.1.:80/",
        "file:///etc/passwd", "gopher://1.1.1.1/", "ftp://1.1.1.1/", "//1.1.1.1/", "1.1.1.1", "", "http://", "https:///x",
        "http://user:secret@1.1.1.1/", "http://1.1.1.1@127.0.0.1/", "http://1.1.1.1:99999/", "http://a b/",
        "http://1.1.1.1/" + "x" * 3000, "http://\x00/", "http://[/", "javascript:alert(1)",
    ],
)  # fmt: skip
def test_urls_that_are_refused(url):
    with pytest.raises(UnsafeUrlError) as caught:
        check_url(url)
    assert caught.value.code == "unsafe_url"
    assert "secret" not in str(caught.value)


def test_one_private_address_among_public_ones_is_enough():
    resolve = names(a_example=["1.1.1.1"], b_example=["1.1.1.1", "10.0.0.1"], c_example=[])
    assert check_url("https://a.example/x?y", resolve=resolve) == [ipaddress.ip_address("1.1.1.1")]
    for host in ("b.example", "c.example"):
        with pytest.raises(UnsafeUrlError):
            check_url(f"https://{host}/", resolve=resolve)
    with pytest.raises(UnsafeUrlError):
        check_url("http://a.example/", resolve=resolve, schemes=("https",))


def test_a_name_that_changes_between_check_and_use_is_pinned_to_what_was_checked():
    """DNS rebinding: the first answer is public, each later one is the metadata service."""
    answers = iter([["93.184.216.34"]] + [["169.254.169.254"]] * 9)
    asked = []

    def inner(request):
        asked.append(request)
        return httpx.Response(200, text="ok")

    transport = SafeTransport(
        resolve=lambda _host, _port: [ipaddress.ip_address(text) for text in next(answers)],
        inner=httpx.MockTransport(inner),
    )
    with httpx.Client(transport=transport) as client:
        assert client.get("https://hook.example/path").text == "ok"
        with pytest.raises(UnsafeUrlError):
            client.get("https://hook.example/path")
    [request] = asked
    assert str(request.url) == "https://93.184.216.34/path"
    assert request.headers["Host"] == "hook.example"
    assert request.extensions["sni_hostname"] == "hook.example"


def test_a_second_address_is_tried_where_the_first_does_not_answer():
    seen = []

    def inner(request):
        seen.append(request.url.host)
        if len(seen) == 1:
            raise httpx.ConnectError("refused")
        return httpx.Response(200)

    transport = SafeTransport(resolve=names(h_example=["1.1.1.1", "1.0.0.1"]), inner=httpx.MockTransport(inner))
    with httpx.Client(transport=transport) as client:
        assert client.post("http://h.example/", content=b"x").status_code == 200
    assert seen == ["1.1.1.1", "1.0.0.1"]


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/to/"))
            self.end_headers()
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.headers["Host"].encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{made.server_port}"
        made.shutdown()
        thread.join()


def test_over_a_real_socket_redirects_are_checked_again(server, monkeypatch):
    """127.0.0.1 is allowed here, as a receiver in one's own house may be; where it redirects to is not."""
    monkeypatch.setenv("HTTP_PROXY", "http://10.0.0.1:1")
    with safe_client(timeout_seconds=10, allowed=LOOPBACK, follow_redirects=True) as client:
        assert client.get(server + "/").text == server.removeprefix("http://")
        assert client.get(f"{server}/to/{server}/").status_code == 200
        for target in ("http://169.254.169.254/", "http://10.0.0.1/", "file:///etc/passwd", "http://[::1]/"):
            with pytest.raises((UnsafeUrlError, httpx.UnsupportedProtocol)):
                client.get(f"{server}/to/{target}")
    with safe_client(timeout_seconds=10) as client, pytest.raises(UnsafeUrlError):
        client.get(server)
