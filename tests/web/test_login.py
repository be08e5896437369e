"""Logging in and out, as people do it."""

from playwright.sync_api import Browser, expect

from tests.fakes.service import PASSWORD, USER, Service
from tests.web.conftest import look_at, opened


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
