"""When a worker distrusts its device, and when it asks it again."""

import time

from batchinfer.errors import DeviceUnhealthyError, EngineDiedError
from batchinfer_workers.device_health import DeviceHealth, probe_device


def wait_until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


class Device:
    """Says what it is told to, and how often it was asked."""

    def __init__(self, wrong="no answer"):
        self.wrong = wrong
        self.asked = 0

    def __call__(self):
        self.asked += 1
        return self.wrong


def test_only_the_devices_own_faults_count():
    health = DeviceHealth(Device())
    health.note(EngineDiedError("a row killed it"))
    assert (health.reason, health.fault, health.seconds_ill) == (None, None, 0.0)
    health.note(DeviceUnhealthyError("uncorrectable ECC error"))
    assert health.reason == "uncorrectable ECC error"
    assert health.fault["reason"] == health.reason


def test_it_is_asked_ever_more_seldom_until_it_answers():
    now, device = [0.0], Device()
    health = DeviceHealth(device, clock=lambda: now[0])
    health.look()
    assert device.asked == 0, "a device that is well is left alone"
    health.note(DeviceUnhealthyError("lost"))
    asked_at = []
    for second in range(0, 400, 10):
        now[0] = float(second)
        before = device.asked
        health.look()
        if second in (30, 90, 210):
            wait_until(lambda seen=before: device.asked > seen)
            wait_until(lambda: not health._is_probing)
        asked_at += [second] * (device.asked - before)
    assert asked_at == [30, 90, 210]
    device.wrong = None
    now[0] = 450.0
    health.look()
    wait_until(lambda: health.reason is None)
    assert health.fault is None


def test_a_probe_that_cannot_run_is_no_answer():
    def broken():
        raise OSError("no more processes")

    now = [0.0]
    health = DeviceHealth(broken, clock=lambda: now[0])
    health.note(DeviceUnhealthyError("lost"))
    now[0] = 31.0
    health.look()
    wait_until(lambda: not health._is_probing)
    assert health.reason == "lost"


def test_a_machine_without_a_gpu_does_not_answer_the_probe():
    wrong = probe_device("auto")
    assert wrong is not None
    assert "CUDA" in wrong or "NVIDIA" in wrong
