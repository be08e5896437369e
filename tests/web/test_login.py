"""Logging in and out, as people do it."""

from pathlib import Path

from playwright.sync_api import Browser, expect

from tests.fakes.service import PASSWORD, USER, Service
from tests.running.ports import free_port
from tests.servers.oidc import provided
from tests.web.conftest import look_at, opened, serving


def test_in_and_out(browser: Browser, served: tuple[Service, str]) -> None:
    context = opened(browser, served[1], log_in=False)
    page = context.new_page()
    page.goto("/uploads")
    expect(page).to_have_title("Log in · SynVirt")
    page.get_by_label("Account").fill(USER)
    page.get_by_label("Password").fill("wrong")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("the user or the password is wrong")
    look_at(page, "login")
    page.get_by_label("Account").fill(USER)
    page.get_by_label("Password").fill(PASSWORD)
    page.keyboard.press("Enter")
    expect(page).to_have_title("Uploads · SynVirt")
    [cookie] = context.cookies()
    assert (cookie["httpOnly"], cookie["secure"], cookie["sameSite"]) == (True, True, "Strict")
    look_at(page, "logged-in")
    page.get_by_role("button", name="Log out").click()
    expect(page).to_have_title("Log in · SynVirt")
    page.goto("/uploads")
    expect(page).to_have_title("Log in · SynVirt")
    context.close()


def test_what_was_typed_outlives_the_session(browser: Browser, served: tuple[Service, str]) -> None:
    """A form is filled in for an hour, or over lunch: its session ends meanwhile."""
    service, address = served
    context = opened(browser, address)
    page = context.new_page()
    page.goto("/windows/new")
    typed = {
        "id": "nights",
        "name": "Nights",
        "timezone": "Europe/Berlin",
        "start": "2026-11-28T22:00:00",
        "end": "2026-11-29T05:00:00",
    }
    for name, value in typed.items():
        page.locator(f"main [name={name}]").fill(value)
    context.clear_cookies()
    page.locator("main [name=end]").press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("nothing was done with what was sent")
    look_at(page, "logged-out-form")
    with context.expect_page() as another:
        page.get_by_role("link", name="Log in, in another tab").click()
    another.value.get_by_label("Account").fill(USER)
    another.value.get_by_label("Password").fill(PASSWORD)
    another.value.keyboard.press("Enter")
    expect(another.value).to_have_title("Migrations · SynVirt")
    page.reload()
    expect(page).to_have_title("Windows · SynVirt")
    assert [(window.id, window.name) for window in service.store.windows.all()] == [("nights", "Nights")]
    context.close()


def test_by_an_openid_provider(browser: Browser, tmp_path: Path) -> None:
    """Which is another site, so that the browser's own rules for cookies and forms hold: a real provider, a real browser."""
    port = free_port()
    with provided(tmp_path, f"https://127.0.0.1:{port}/login/oidc/callback") as provider:
        service = Service(tmp_path / "data", listen=f"127.0.0.1:{port}", **provider.settings)
        with serving(service) as address:
            context = opened(browser, address, log_in=False)
            page = context.new_page()
            complaints: list[str] = []
            page.on(
                "console",
                lambda message: complaints.append(message.text) if "Content Security Policy" in message.text else None,
            )
            page.goto("/uploads")
            look_at(page, "login-oidc")
            page.get_by_role("button", name="Log in by Lab").click()
            page.get_by_label("Username").fill("olga")
            page.get_by_label("Password").fill("olga")
            page.get_by_role("button", name="Let me in").click()
            expect(page).to_have_title("Uploads · SynVirt")
            expect(page.locator(".who-am-i")).to_contain_text("oidc:olga")
            page.get_by_role("button", name="Log out").click()
            expect(page.get_by_role("link", name="Log out of Lab, too")).to_be_visible()
            look_at(page, "logged-out-oidc")
            page.goto("/uploads")
            expect(page).to_have_title("Log in · SynVirt")
            assert complaints == []
            context.close()
        service.close()
