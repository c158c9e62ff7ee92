# ruff: noqa: F401
import a_package_that_nobody_has


class Raisesonimportbootcamp:
    pass
