# ruff: noqa: F401, F403
"""As in a real checkout: imports every class. Nothing may ever run this."""

import warnings

from .base import Basebootcamp
from .divides.divides import Dividesbootcamp
from .exits_on_import.exits_on_import import Exitsonimportbootcamp
from .exits_while_judging.exits_while_judging import Exitswhilejudgingbootcamp
from .guesses.guesses import *
from .hangs.hangs import Hangsbootcamp
from .hangs_while_judging.hangs_while_judging import Hangswhilejudgingbootcamp
from .hungry.hungry import Hungrybootcamp
from .noisy.noisy import NoisybootCamp
from .raises_on_import.raises_on_import import Raisesonimportbootcamp
from .restless.restless import Restlessbootcamp

raise RuntimeError("the whole package was imported")
