"""The pages in a real browser: a job is submitted, watched, cancelled, and its failed rows are read."""

import json
import urllib.request

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from batchinfer.jobs.caller import Caller, Role
from batchinfer.jobs.service import JobService
from batchinfer.jobs.spec import JobSpec
from tests.browser import chromium, picture, watch
from tests.fakes import answer
from tests.processes import Process

pytestmark = [pytest.mark.service]

PHONE = {"width": 390, "height": 844}
DESKTOP = {"width": 1280, "height": 900}
NASTY = "<img src=x onerror=alert(1)>\"'{{ 7 * 7 }}"


@pytest.fixture(scope="module")
def browser():
    with chromium() as made:
        yield made


@pytest.fixture(scope="module")
def installation(tmp_path_factory, sqlite_template):
    """A server and a worker that share a database."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "b.db").write_bytes(sqlite_template.read_bytes())
    settings = {
        "database_url": f"sqlite:///{folder / 'b.db'}",
        "home": folder,
        "usd_per_hour": "3600",
        "tick_seconds": 0.2,
    }
    with Process("serve", "--port", 0, **settings) as server, Process("worker", **settings):
        line = server.wait_for(lambda line: "batchinfer serves http" in line)
        yield {"url": line.split("serves ")[1].split("/v1")[0], "folder": folder, "settings": settings}


@pytest.fixture
def faults():
    """What pages did that they must not; empty at the end."""
    found = []
    yield found
    assert found == []


@pytest.fixture
def page(browser, installation, faults):
    context = browser.new_context(base_url=installation["url"], viewport=DESKTOP, color_scheme="light")
    yield watch(context.new_page(), installation["url"], faults)
    context.close()


def write_prompts(folder, name, prompts):
    pq.write_table(pa.table({"prompt": prompts}), folder / name)
    return str(folder / name)


def submit(page, *, inputs, **fields):
    page.goto("/")
    page.get_by_role("link", name="New job").click()
    page.get_by_role("textbox", name="Inputs").fill(inputs)
    page.get_by_role("combobox", name="Model").fill("org/fake")
    for field, value in fields.items():
        page.locator(f"[name={field}]").fill(value)
    page.get_by_role("button", name="Submit").click()
    page.wait_for_url("**/jobs/job*")


def assert_accessible(page, where):
    """What axe-core finds: names, contrast, landmarks, order of headings."""
    results = Axe().run(page)
    assert results.violations_count == 0, f"{where}: {results.generate_report()}"


def test_a_job_from_the_form_to_its_rows(page, installation):
    """Submit through the page, watch it finish without a reload, read an error row and the first rows."""
    prompts = [f"row {number} says hello" for number in range(60)] + ["", "ERROR please"]
    inputs = write_prompts(installation["folder"], "prompts.parquet", prompts)
    submit(page, inputs=inputs, name=NASTY)
    page.evaluate("window.isSamePage = true")
    stand = page.get_by_role("region", name="How it stands")
    expect(stand).to_contain_text("completed", timeout=40_000)
    expect(stand).to_contain_text("partial")
    samples = page.get_by_role("region", name="Samples of failed rows")
    expect(samples.get_by_role("row").filter(has_text="61")).to_contain_text("engine_error")
    expect(samples.get_by_role("row").filter(has_text="empty_prompt")).to_contain_text("60")
    rows = page.get_by_role("region", name="First rows of the output")
    expect(rows.get_by_role("row").nth(3)).to_contain_text(answer(prompts[2]))
    assert page.evaluate("window.isSamePage"), "the page was loaded anew"
    expect(page.get_by_role("heading", level=1)).to_have_text(NASTY)
    expect(page.get_by_role("img", name="Attempts over time")).to_have_count(1)
    # the figures are the API's
    job_id = page.url.rpartition("/")[2]
    with urllib.request.urlopen(f"{installation['url']}/v1/jobs/{job_id}") as response:
        job = json.load(response)
    assert (job["rows"]["succeeded"], job["rows"]["errored"]) == (60, 2)
    expect(page.get_by_text("rows $0.061")).to_be_visible()
    assert job["cost"]["metered_usd"].startswith("0.061")
    assert_accessible(page, "a job")
    picture(page, "job-light")
    page.emulate_media(color_scheme="dark")
    assert_accessible(page, "a job in the dark")
    picture(page, "job-dark")
    page.set_viewport_size(PHONE)
    picture(page, "job-phone")
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], "the page scrolls sideways"


def test_cancel_by_keyboard(page, installation):
    """Rows that ended stay; the question is asked first."""
    inputs = write_prompts(installation["folder"], "slow.parquet", [f"SLEEP:0.2 {number}" for number in range(400)])
    submit(page, inputs=inputs, name="slow one")
    stand = page.get_by_role("region", name="How it stands")
    expect(stand).to_contain_text("in progress", timeout=40_000)
    questions = []
    page.once("dialog", lambda dialog: (questions.append(dialog.message), dialog.accept()))
    page.get_by_role("button", name="Cancel").focus()
    page.keyboard.press("Enter")
    expect(stand).to_contain_text("cancelled", timeout=40_000)
    assert len(questions) == 1
    expect(page.get_by_role("button", name="Cancel")).to_have_count(0)
    expect(page.get_by_role("button", name="Retry")).to_have_count(1)


def test_what_is_wrong_is_said_beside_the_field(page, installation):
    page.goto("/submit")
    page.get_by_role("textbox", name="Inputs").fill(str(installation["folder"] / "nowhere.parquet"))
    page.get_by_role("combobox", name="Model").fill("org/fake")
    page.locator("[name=budget_usd]").fill("-1")
    page.get_by_role("button", name="Submit").click()
    expect(page.get_by_role("alert")).to_contain_text("budget_usd")
    expect(page.locator("[name=budget_usd]")).to_have_attribute("aria-invalid", "true")
    expect(page.get_by_role("textbox", name="Inputs")).to_have_value(str(installation["folder"] / "nowhere.parquet"))
    assert_accessible(page, "a form with a fault")
    picture(page, "submit-fault")


def test_an_uploaded_file_becomes_an_input(page, installation):
    inputs = write_prompts(installation["folder"], "mine.parquet", ["one two", "three four"])
    page.goto("/submit")
    page.get_by_label("Or upload a file").set_input_files(inputs)
    expect(page.locator("output")).to_contain_text("mine.parquet is file")
    page.get_by_role("combobox", name="Model").fill("org/fake")
    page.get_by_role("button", name="Submit").click()
    expect(page.get_by_role("region", name="First rows of the output")).to_contain_text("two one", timeout=40_000)


def test_every_page_is_readable_by_everyone(page, installation):
    for path, heading in (
        ("/", "Jobs"), ("/submit", "New job"), ("/schedules", "Schedules"), ("/usage", "Usage"), ("/workers", "Workers"),
        ("/jobs/job_none", "Not found"),
    ):  # fmt: skip
        page.goto(path)
        expect(page.get_by_role("heading", level=1)).to_have_text(heading)
        name = heading.lower().replace(" ", "-")
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            assert_accessible(page, f"{path} ({scheme})")
            picture(page, f"{name}-{scheme}")
        page.set_viewport_size(PHONE)
        picture(page, f"{name}-phone")
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], path
        page.set_viewport_size(DESKTOP)
    # by keyboard alone: the first stop leads past the menu
    page.goto("/")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()


def test_a_key_is_the_password_and_shows_its_tenant_alone(browser, installation, faults, tmp_path):
    """The browser asks by itself; what belongs to another tenant is not there, and a viewer has no buttons."""
    settings = installation["settings"] | {"database_url": f"sqlite:///{tmp_path / 'keys.db'}", "home": tmp_path}
    service = JobService.connect(settings["database_url"], "memory://")
    for tenant in ("red", "blue"):
        service.tenants.add(Caller.operator(), tenant, input_roots=["s3://b"], output_roots=["s3://b"])
        acting = service.acting_for(Caller(tenant, Role.ADMIN))
        spec = JobSpec(
            inputs=("s3://b/p.parquet",), model="org/fake", output=f"s3://b/{tenant}/", name=f"job of {tenant}"
        )
        acting.submit(spec, base=None)
    token = service.keys.create(Caller.operator(), tenant="red", role=Role.VIEWER)[1]
    theirs = service.acting_for(Caller("blue", Role.VIEWER)).list_jobs().data[0].id
    service.close()
    with Process("serve", "--port", 0, **settings) as server:
        url = server.wait_for(lambda line: "batchinfer serves http" in line).split("serves ")[1].split("/v1")[0]
        context = browser.new_context(base_url=url)
        assert context.request.get("/", headers={"Accept": "text/html"}).status == 401
        context.close()
        context = browser.new_context(base_url=url, http_credentials={"username": "", "password": token})
        page = watch(context.new_page(), url, faults)
        page.goto("/")
        expect(page.get_by_role("link", name="job of red")).to_have_count(1)
        expect(page.get_by_text("job of blue")).to_have_count(0)
        expect(page.get_by_role("link", name="New job")).to_have_count(0)
        page.get_by_role("link", name="job of red").click()
        expect(page.get_by_role("button", name="Cancel")).to_have_count(0)
        assert page.goto(f"/jobs/{theirs}").status == 404
        context.close()
