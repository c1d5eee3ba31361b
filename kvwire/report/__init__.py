"""Report on a store's content and benefit, as one HTML page."""

from typing import TYPE_CHECKING

from kvwire._lazy import lazy

if TYPE_CHECKING:
    from kvwire.report.first_token import FirstTokens, first_tokens
    from kvwire.report.page import write_page
    from kvwire.report.surveying import ConfigSurvey, Survey, survey

__all__ = [
    "ConfigSurvey",
    "FirstTokens",
    "Survey",
    "first_tokens",
    "survey",
    "write_page",
]

__getattr__ = lazy(__name__)
