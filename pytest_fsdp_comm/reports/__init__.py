"""Values as people read them: in a failed test, on a terminal, in a browser.

In come differences, trees and answers, out goes text. Knows neither torch nor pytest; may know
`comm` and `tree`.
"""
