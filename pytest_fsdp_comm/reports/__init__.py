"""Values as people read them: in a failed test, on a terminal, in a browser.

Differences, trees and answers come in; text goes out. Imports neither torch nor pytest.
"""
