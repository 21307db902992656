"""No secret reaches a log line, through a message, an argument or a traceback."""

import logging
import secrets

from batchinfer.cli.connect import set_up_logs


def test_logs_hold_no_secret(capfd):
    secret = "S" + secrets.token_hex(21)
    key = f"bi_abcdefghijkl_{secret}"
    set_up_logs("debug")
    log = logging.getLogger("any.library")
    log.info("key %s", key)
    log.warning("Authorization: Bearer %s", secret)
    log.error("cannot reach postgresql://user:%s@db/name", secret)
    try:
        {}[key]
    except KeyError:
        log.exception("failed")
    written = capfd.readouterr().err
    logging.basicConfig(force=True)
    assert secret not in written
    assert written.count("***") >= 4
    assert "bi_abcdefghijkl_***" in written
    assert "postgresql://user:***@db/name" in written
