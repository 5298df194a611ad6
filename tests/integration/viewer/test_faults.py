"""The page of the tests sees what a good page never does."""

from __future__ import annotations

import pytest

from tests.support.browser import Page

pytestmark = pytest.mark.browser


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("console.error('something broke')", "something broke"),
        ("setTimeout(() => { throw new Error('it broke later') })", "it broke later"),
        ("Promise.reject(new Error('promised'))", "promised"),
        ("document.body.append(Object.assign(document.createElement('script'), {src: '/static/lib.js'}))", "violation"),
        ("document.body.innerHTML = '<b>markup</b>'", "violation"),
        ("fetch('http://127.0.0.1:1/elsewhere').catch(() => 0)", "violation of connect-src"),
        ("document.body.append(Object.assign(new Image(), {src: 'http://127.0.0.1:1/x.png'}))", "violation of img-src"),
        ("document.body.setAttribute('onclick', 'alert(1)')", "violation"),
    ],
)
def test_a_fault_is_seen(page: Page, code: str, told: str) -> None:
    assert page.faults() == []
    page.driver.execute_script(f"try {{ {code} }} catch {{}}")
    page.until(lambda: any(told in fault for fault in page.faults()), told)
    page.driver.get("about:blank")
    page.script("window.watched = []")
    page.forget()
