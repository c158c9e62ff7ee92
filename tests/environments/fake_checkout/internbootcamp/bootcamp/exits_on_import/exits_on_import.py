import sys

sys.exit(0)


class Exitsonimportbootcamp:
    pass
