"""Common English words of 3 to 8 letters, in alphabetical order."""

_TEXT = """
    ant apple arm bag basket bed bee bin bird blanket boat book bottle box boy bread bridge bus button cake
    camera candle car carpet castle cat chair cloud coat corn cow cup day desk dinner dog door dragon duck ear
    egg eye fan farm farmer finger fire fish flower fog forest fox frog game garden gas gate gem gold green
    guitar hammer hand hat hen hill home horn horse house hunter ice ink island jacket jam jar key kid king
    kitten ladder lake lamp leaf leg lemon letter lid light lion log map market milk mirror monkey moon
    mountain mouse mud music needle nest net nose nut oak ocean orange owl page pan paper park parrot pear pen
    pencil pepper picture pig pillow planet plant pocket pot potato purple rabbit rain rat red ribbon ring
    river road rocket roof room rope rose rug salt sand school sea seed shadow ship shoe silver singer sister
    sky snow sofa soldier soup spider spring square star stone street student sugar summer sun sunset table
    tea teacher temple tent ticket tiger toe tomato toy tree tunnel turtle uncle valley van village violin
    wagon wall water wax web whisper win wind window winter wizard wolf wood yard yellow yes zebra zoo
"""

WORDS: tuple[str, ...] = tuple(_TEXT.split())
