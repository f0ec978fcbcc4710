"""Text for measurements: two sets of short passages with a question each, one for profiles and one for the demo.

A profile measured on the text it is later judged by would flatter itself, so the two sets share no passage. All of it
was written for this project (its licence applies); places and people are invented, so a model can only answer from
the context.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Passage:
    """A paragraph, and a question that only it answers."""

    title: str
    text: str
    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """A context of a given number of tokens that ends with its question; `CUE` is what a continuation starts from."""

    ids: tuple[int, ...]
    question: str
    answer: str


CUE: Final = "According to the text,"
"""Prompt of the continuation: the first text behind the context. It keeps a small model from a one-word answer."""

PROFILE: Final[tuple[Passage, ...]] = (
    Passage(
        "The tide mill at Sallow Creek",
        "The mill at Sallow Creek has no river. Twice a day the sea fills a pond of eleven acres through a gate "
        "that opens inward and shuts by its own weight when the tide turns. The miller waits until the channel "
        "outside has dropped below the wheel, and then has about five hours of falling water to work with. Because "
        "the tides come fifty minutes later each day, so does the milling, and the family that runs it keeps a "
        "table of working hours pinned beside the bread bin. In the spring of the great storm the gate was torn "
        "from its hinges and the pond lay open for a month. Hanna Verrel, who had taken over from her uncle only "
        "that winter, used the time to rehang the gate on oak posts instead of iron ones, since the salt had eaten "
        "the iron within nine years. The posts are still there. The flour is coarse, slightly grey, and sold mostly"
        " to bakers who make flat loaves for the fishing boats.",
        "What did Hanna Verrel use instead of iron to rehang the gate?",
        "oak posts",
    ),
    Passage(
        "How a town kept time",
        "Before the railway came to Ostrey, every village along the valley kept its own noon. The sexton set the "
        "church clock by a brass sundial, and a traveller who walked twelve miles east gained almost a minute. "
        "Nobody minded. When the line was opened the company sent a guard each morning with a sealed watch, set at "
        "the observatory, and he showed it to each stationmaster in turn. The stationmasters moved their hands; the"
        " sextons did not. For sixteen years the town had a railway time and a church time, seven minutes apart, "
        "and the inn closed by whichever was later. The quarrel ended without a decision. The sundial was stolen "
        "one night in November, the sexton had nothing left to set his clock by, and on the following Sunday he "
        "walked down to the station and asked, quite politely, whether he might look at the watch. An empty plinth "
        "still stands in the churchyard, and children use it as the safe place in games of tag.",
        "Why did the sexton finally adopt railway time?",
        "the sundial was stolen",
    ),
    Passage(
        "Notes on keeping bees on a roof",
        "A roof is a better place for bees than it looks. It is warm, nobody walks past, and within two miles of "
        "most cities there are more kinds of flowers than in a whole county of wheat. The difficulties are wind and"
        " water. A hive that is not strapped down will go over in the first gale of autumn, so each of ours stands "
        "on a paving slab with a belt around both. Water is worse: bees that cannot find a shallow place to drink "
        "will visit a neighbour's swimming pool in their thousands. We put out a tray of pebbles in April, before "
        "they form the habit, because once they have learned a source they will not be taught another. The first "
        "year gave eighteen kilos of honey from three hives. It tasted of lime trees and, faintly, of mint, which "
        "puzzled everyone until a caretaker two streets away admitted to an enormous bed of it behind the boiler "
        "house. Inspections are on Thursdays, after the lift has been serviced.",
        "Where did the taste of mint in the honey come from?",
        "a caretaker's bed of mint behind the boiler house",
    ),
    Passage(
        "The survey of the Corran marshes",
        "Mapping the Corran marshes took four summers, though the whole of it is smaller than an airport. The "
        "ground moves. A peg driven in June had drifted half a metre by August, and two of the stone markers from "
        "the previous century were found lying side by side, as if they had gone looking for company. The surveyors"
        " began with chains, changed to theodolites on platforms of birch poles, and ended by floating the "
        "instruments on a raft moored to three trees. Ilse Maddern, who drew the final sheets, refused to print the"
        " channels as lines. She drew them as bands of dots, denser where boats had passed in more of the summers, "
        "so that the map showed not where the water was but how often it had been there. The ministry sent it back "
        "twice as unfinished. Local boatmen bought all the copies they could get, and the ministry, having nothing "
        "else to sell, printed it a third time without another word.",
        "How did Ilse Maddern draw the channels on the map?",
        "as bands of dots",
    ),
    Passage(
        "A short guide to bread that fails",
        "Most bread fails in one of three ways, and each can be read from the crumb. If the loaf is dense at the "
        "bottom and open at the top, it was baked before the dough had finished rising, and the last gas was made "
        "by the heat of the oven. If large holes lie just under the crust with a tight crumb below, the dough stood"
        " too long and its skin came loose. If the crumb is even but gummy, the loaf was cut warm; the starch needs"
        " to cool before it sets, and nothing done earlier will help. The school in Dunmere teaches by collecting "
        "failures. Each student brings one spoiled loaf on Monday, the loaves are sawn in half, and the class must "
        "say what happened before anyone is allowed to explain. The teacher, a retired bridge inspector called "
        "Pell, says he does the same work as before: he looks at a section and asks what the load was. Perfect "
        "loaves are not discussed. They are eaten at eleven.",
        "What was Pell's job before he taught baking?",
        "bridge inspector",
    ),
    Passage(
        "The lighthouse that moved",
        "When the lamp on Farrow Point was built it stood two hundred paces from the edge of the cliff, and the "
        "keeper grew potatoes on the seaward side. Chalk falls in slabs. In a bad winter the edge came nine paces "
        "nearer, in a good one it did not move at all, and by the time the keeper's grandson had the post the "
        "potatoes were gone and the spray reached the windows. The engineers did not pull the tower down. They cut "
        "it free of its footing, raised it on forty hydraulic jacks by the width of a hand, and pushed it inland "
        "along four concrete beams greased with tallow. It travelled seventeen metres in three days. The lamp was "
        "lit each night, since no notice to mariners could be printed in time, and ships at sea saw nothing strange"
        " except that one captain logged the light as bearing a little too far north. He was right, and was sent a "
        "bottle of brandy by the authority. The beams were left in place, pointing inland.",
        "What was used to grease the concrete beams?",
        "tallow",
    ),
    Passage(
        "Why the choir sings flat",
        "A choir that sings without an organ usually ends lower than it began. Singers blame tiredness, conductors "
        "blame the altos, but the cause is arithmetic. Voices tune to each other in pure intervals, and pure "
        "intervals do not close: a chain of them that should return to its first note arrives a small step below "
        "it. A piece that wanders through such chains loses a little each time, and the better the singers listen, "
        "the more faithfully they fall. The choir of Saint Odo tested this with a recording of one motet sung "
        "eleven times. On nine occasions it sank by the same amount, a third of a semitone, at the same two bars. "
        "Their director, Marit Oyen, rewrote nothing. She asked the basses to hold one note across the second of "
        "those bars against everyone else, which sounds wrong for the length of a breath and then brings the whole "
        "choir home. Listeners notice a moment of tension that they cannot explain, and like it.",
        "Who did Marit Oyen ask to hold one note?",
        "the basses",
    ),
    Passage(
        "Glass from the lake shore",
        "The sand on the north shore of Lake Immer is nearly white, and for two centuries it went by cart to the "
        "glassworks at Teal. A furnace once lit was not allowed to go cold, because cooling cracked the pots; it "
        "burned beech day and night for up to fourteen months, and the village measured time in furnaces rather "
        "than years. The master mixed each charge by tasting it. Potash is bitter, lime is dry, and a man named "
        "Corvin was said to tell the proportion of either to one part in fifty. After his death the glass turned "
        "green, and remained so for a decade, until his daughter found that the new sand came from a pit with "
        "traces of iron, and that her father had always quietly rejected carts from that side of the shore. She had"
        " not inherited his tongue. She used a magnet. The clear glass returned, and the magnet, worn smooth, hangs"
        " in the town hall beside a portrait that does not resemble anyone.",
        "How did Corvin's daughter detect the iron in the sand?",
        "with a magnet",
    ),
    Passage(
        "Rules of the night library",
        "The library in Quill Street opens at nine in the evening and closes at five. It was founded for bakers, "
        "nurses and tram drivers, who until then had never seen a librarian awake. Its rules fit on a postcard. "
        "Books may be taken out only at the end of a shift. Sleep is permitted in the reading room, snoring is not,"
        " and a lamp that has been switched off three times by the same hand is deemed to be out of order. Soup is "
        "served at two. The collection leans towards novels of the sea, for reasons nobody has established, and "
        "towards repair manuals, for reasons that everybody knows. In its first winter the library lent nine "
        "thousand volumes and lost four. One of the four came back after twenty-two years, in a parcel with no "
        "sender, together with a payment for the delay calculated at the rate of the time and a short note that "
        "praised the ending. The book was a manual for the maintenance of steam pumps.",
        "What kind of book came back after twenty-two years?",
        "a manual for steam pumps",
    ),
    Passage(
        "Repairing a suspension bridge by hand",
        "The footbridge over the Arle hangs from two cables of nineteen strands. No crane can reach it, so "
        "everything that wears out is replaced by people on foot carrying what they can lift. Deck planks are easy:"
        " each is held by four bolts and weighs less than a child. Hangers are harder, because the bridge twists "
        "when one is missing, and so they are changed in pairs, one upstream and one down, at the same moment and "
        "on a whistle. The strands themselves are never changed singly. Every six years the crew measures the pitch"
        " at which each cable hums when struck with a wooden mallet; a lower note means a broken wire inside. In "
        "the last measurement the northern cable had dropped by less than anyone could hear, but a tuning fork "
        "showed it. The council closed the bridge to horses, left it open to everybody else, and ordered the steel,"
        " which will arrive on a barge in March and be carried up the gorge in coils of thirty kilos.",
        "Why are hangers replaced in pairs?",
        "because the bridge twists when one is missing",
    ),
    Passage(
        "Potatoes above the tree line",
        "On the plateau of Hask the growing season lasts seventy days, and frost may come on any of them. Farmers "
        "there plant in raised beds between ditches of standing water. The ditches take up heat by day and give it "
        "back at night, which keeps the leaves two or three degrees warmer than the open field, and two degrees is "
        "usually enough. The method is old. It was given up when the tractors came, since a tractor cannot turn "
        "between ditches, and it returned when three harvests in five were lost. The beds are dug with a long "
        "narrow spade whose blade is bent like a question mark, made by one smith in the village of Orra. A good "
        "bed lasts twelve years before it must be turned over, mud from the ditch being thrown up on top as manure."
        " Yields are a third above those of the plain below. The smith has an order book for four years and has "
        "taken on an apprentice, who is his former schoolteacher.",
        "Who is the smith's apprentice?",
        "his former schoolteacher",
    ),
    Passage(
        "The ferry timetable",
        "The ferry between Lund and the island of Brae leaves when it is full, or at ten past the hour, or when the"
        " doctor is on board, whichever comes first. This arrangement was never written down until a visitor from "
        "the transport office asked to see the timetable. The skipper, Tove Aldis, said that there was none, and "
        "that if there were one it would be wrong. The visitor spent a week on the quay with a stopwatch. He found "
        "that the average wait was eleven minutes, that it would be nineteen under any fixed schedule the boat "
        "could keep, and that the longest delay of the week had been caused by himself, when he asked for the "
        "engine to be stopped so that he could take a measurement. His report ran to forty pages and recommended no"
        " change. A copy is nailed to the wall of the waiting room, where passengers add remarks in the margins. "
        "The most recent one says that the doctor now has a boat of her own.",
        "What caused the longest delay of the week?",
        "the visitor himself, who had the engine stopped",
    ),
)
"""Passages for measuring profiles; never used by the demo."""

DEMO: Final[tuple[Passage, ...]] = (
    Passage(
        "The weather station on Mount Senn",
        "Two people live on Mount Senn from October to May. They read the instruments every three hours, clear the "
        "ice from the wind gauge with a rubber hammer, and send the numbers down by radio, since the telephone line"
        " is carried away by avalanches about every second winter. The instruments could be read by a machine, and "
        "since a few years ago they are. The two observers stayed because of the hammer. No heater has been found "
        "that keeps the gauge free at forty below in a wind that carries rime, and a gauge that is stuck reports a "
        "calm. On the night of the second of February the machine reported a calm. Jonna Reik, who had gone out to "
        "look at the stars, could not stand upright, and crawled back along the rope to write into the log that the"
        " wind was beyond the scale. The roof of the lower cable station was found in spring, four kilometres to "
        "the east, with its lightning rod still attached and hardly bent.",
        "What do the observers use to clear ice from the wind gauge?",
        "a rubber hammer",
    ),
    Passage(
        "The orchard of forgotten apples",
        "Every variety of apple is a single tree, kept alive by grafting its twigs onto other roots. When the last "
        "person who grafts it stops, it ends. The orchard at Pommery holds two hundred and sixty such trees, each "
        "one the last or next to last of its kind. Most are not good to eat. There is one for cider that keeps its "
        "sourness, one that stores until June in a box of dry leaves, one whose only merit is that it flowers after"
        " the late frosts. The owner, Anselm Duq, found nearly half of them by asking postmen, who know which "
        "gardens are old and which owners are deaf to advice. His catalogue gives for each tree the taste, the "
        "keeping time, and the name of the dog that barked at him when he first came to see it. He lends twigs to "
        "anybody who promises to give twigs away in turn. So far eleven varieties have been planted in more than "
        "fifty gardens, and are, as he puts it, no longer interesting.",
        "Whom did Anselm Duq ask to find old apple trees?",
        "postmen",
    ),
    Passage(
        "A canal with two levels",
        "The Varn canal climbs thirty metres in a single place by means of a boat lift that uses no engine. Two "
        "steel troughs hang from one set of chains, each large enough for a barge and each filled with the same "
        "depth of water. A barge weighs exactly as much as the water that it pushes aside, so the troughs balance "
        "whether there are boats in them or not. To move them the keeper lets a hand's breadth of extra water into "
        "the upper trough. It sinks, the other rises, and four minutes later they have changed places. The extra "
        "water is drained at the bottom and that is the whole cost of the passage: eighty tonnes of water that "
        "would have run downhill in any case. The lift stopped only once, for nineteen days, when a swan nested in "
        "the lower trough. Keeper Lisbet Harn put up a notice, barges queued for three miles, and a baker from the "
        "nearest village sold bread from a rowing boat until the eggs had hatched.",
        "Why did the boat lift stop for nineteen days?",
        "a swan nested in the lower trough",
    ),
    Passage(
        "Learning to hear a bearing fail",
        "In the paper mill at Grauwald there are four thousand bearings, and for a long time one man listened to "
        "them. He held a screwdriver to the housing and the handle to his ear and wrote a mark from one to five in "
        "a notebook. A five meant that the machine had to be stopped within the day. When he announced his "
        "retirement the mill bought sensors. They were accurate, and they produced so many alarms that after a "
        "fortnight they were switched off. A young engineer named Sabe Tolland spent the winter comparing the "
        "recordings with the notebook. She noticed that the old man had never given a four to a bearing that was "
        "getting louder; he gave it to bearings that had become quieter. A bearing whose grease has hardened falls "
        "silent some days before it breaks. The sensors were taught to report silence, and the alarms came down to "
        "two a week. The notebook is now kept in the safe together with the patents.",
        "What were the sensors taught to report?",
        "silence",
    ),
    Passage(
        "The salt road",
        "For about six hundred years salt was carried from the coast at Merrin to the inland towns on the backs of "
        "mules. A mule carries two sacks of fifty kilos and walks twenty-five kilometres a day, so the inns stand "
        "twenty-five kilometres apart, and where the road climbs they stand closer. Rain was the enemy. A wet sack "
        "lost a tenth of its weight before the next inn, and the drivers were paid by what they delivered. They "
        "wove covers from goat hair, which swells in the rain and closes its own pores, and they sang to keep the "
        "animals at an even pace, since a mule that hurries sweats into its load. One of the songs has forty-one "
        "verses, each naming a bend of the road and what to watch for in it. Engineers who laid the modern highway "
        "followed the song from the third verse to the thirty-eighth. In the thirty-ninth they preferred their own "
        "judgement, and there the slope has slid into the valley twice.",
        "What were the covers for the salt sacks woven from?",
        "goat hair",
    ),
    Passage(
        "A hospital for instruments",
        "Violins come to the workshop in Lantern Yard for two reasons: somebody has sat on them, or they have "
        "stopped speaking. The first kind is simple. Spruce breaks along the grain, the pieces fit, and warm glue "
        "holds them for another century. The second kind may take months. An instrument that has not been played "
        "for years grows stiff, and the usual remedy is to play it; but the owner has often come because playing it"
        " is no pleasure. Renske Vaal has a machine for this, made from a sewing-machine motor and a loop of "
        "horsehair, which bows one note for eight hours a day in a cupboard lined with felt. She changes the note "
        "each morning. After three weeks the tone opens, as if a curtain had been drawn back. Physicists have "
        "measured instruments before and after and found no difference. Musicians, who were not told which were "
        "which, picked the treated ones eleven times in twelve. Renske says that both results seem right to her.",
        "What did Renske Vaal make her bowing machine's motor from?",
        "a sewing machine",
    ),
    Passage(
        "Counting the geese at Tarn Lough",
        "Each autumn some forty thousand geese come down on Tarn Lough within ten days, and each autumn volunteers "
        "count them. Nobody can count forty thousand geese. What they do is count a hundred, look hard at how much "
        "sky a hundred takes up, and lay that patch across the flock as a tailor lays a pattern across cloth. Two "
        "people do it independently and may not speak until both have written down a figure. If the figures differ "
        "by more than a tenth they count again. Photographs showed later that good counters are low by about six "
        "percent, always low, and always by nearly the same amount, so the figures are multiplied and published. "
        "The best counter of all was a boy of twelve, Emmet Sorley, who had never been told the method. He counted "
        "the wings and divided by two. Asked how he kept track of so many, he said that geese fly in families, and "
        "that families come in fives, apart from the sad ones.",
        "How did Emmet Sorley count the geese?",
        "he counted the wings and divided by two",
    ),
    Passage(
        "The printer of Halfpenny Lane",
        "Type is cast in lead, and lead wears. After a hundred thousand impressions the thin strokes of the letter "
        "e are gone, and a page begins to look as if it were read through a tired eye. The printer of Halfpenny "
        "Lane, Odile Brask, kept a drawer for letters in each state of wear and used them on purpose. New type went"
        " into bills and contracts. Half-worn type, which prints softly, went into wedding announcements. The "
        "oldest was saved for ghost stories, a monthly series that paid for all the rest. When the shop was sold "
        "the buyer melted everything, cast it anew, and was surprised to lose the readers of the series within a "
        "year. They complained that the stories had become less frightening. The text had not changed by a word. "
        "One drawer escaped because it had been used to prop a window; the museum prints from it once a year, on "
        "the longest night, an edition of sixty copies.",
        "For what did Odile Brask save the oldest type?",
        "ghost stories",
    ),
    Passage(
        "Cooling a city with an underground lake",
        "Under the old town of Vessa lies a lake that nobody has seen. It fills the galleries of a limestone "
        "quarry, abandoned when the water came in, and its temperature is nine degrees in every season. Since the "
        "summer of the long heat the town pumps this water through a ring of pipes beneath the main streets. It "
        "passes the hospital first, then the archives, then the market hall, and returns to the far end of the "
        "quarry four degrees warmer. The quarry is so large that the warmth takes eleven months to drift back to "
        "the intake, and by then it is winter, and a little warmth is welcome. The engineer in charge, Paolo Quist,"
        " discovered the delay by accident, when a dye that he had poured in to look for leaks turned the "
        "hospital's taps pale green almost a year later. He has since been asked to announce experiments "
        "beforehand. The system uses one-ninth of the electricity of the machines it replaced.",
        "Which building does the cooling water pass first?",
        "the hospital",
    ),
    Passage(
        "The last signal box",
        "At Kettle Junction five railway lines meet, and until recently all of them were governed by forty-four "
        "levers in a wooden house on stilts. Each lever moves a signal or a set of points by a wire up to a mile "
        "long. The wires stretch in the sun and shrink in the frost, so the first task of each shift is to tighten "
        "or slacken them by feel. A system of sliding bars under the floor makes it impossible to pull two levers "
        "that would bring two trains together; it was built in one winter by a clockmaster and has never been "
        "wrong. When the computers came, the engineers copied its logic into software and found a rule that they "
        "could not explain: lever nineteen locks lever thirty whenever lever seven is normal. They left it out. "
        "Signalwoman Greta Lund asked them to put it back. It turned out to protect a siding that had been lifted "
        "fifty years before, and which the railway, it was then announced, was about to rebuild.",
        "What did the unexplained rule turn out to protect?",
        "a siding that had been lifted fifty years before",
    ),
    Passage(
        "Dyeing with what grows in walls",
        "The weavers of Skerry Row take their colours from lichens. A grey crust scraped from north walls, left for"
        " ten weeks in a jar with stale beer, turns to a violet that no flower gives. A yellow one from the slates "
        "makes brown, a black one from the shore makes a surprising pink. Lichens grow about a millimetre a year, "
        "so the weavers have a rule that is older than their looms: a wall is scraped once in a lifetime, and only "
        "by somebody born in the parish. The walls are marked with initials. Last year a dealer offered a great "
        "deal of money for two tonnes of the violet, and the weavers calculated, for his information, that he would"
        " have it in about four hundred years. He went to a chemist instead. The chemist made a violet that was "
        "nearly the same, but it faded in sunlight. The weavers bought a small amount of it for linings, where "
        "there is no sun, and told everyone that they had done so.",
        "For what did the weavers buy the chemist's violet?",
        "linings",
    ),
    Passage(
        "A school on a barge",
        "The children of the river people cannot stay in one place for a school, so the school moves. It is a barge"
        " of thirty metres with two classrooms, a stove, and a bell from a scrapped tug. It ties up wherever the "
        "most boats are, for a fortnight at a time, and pupils who must leave before then are handed a brown "
        "envelope with the work for the next stretch. The envelopes are collected by lock-keepers and travel by "
        "whichever boat goes in the right direction. In thirty-one years five have been lost, and two of those to "
        "the same dog. The teacher, Wim Sarabin, was a lock-keeper himself. He takes geography from the windows and"
        " arithmetic from the cargo: how many tonnes of gravel, how deep will she sit, will she pass under the "
        "bridge at Oost with the water as it is today. There is an examination each spring, and it is the bridge. "
        "Nobody has failed it so far by more than the thickness of a coat of paint.",
        "What was Wim Sarabin before he became a teacher?",
        "a lock-keeper",
    ),
)
"""Passages for the demo and for evaluation; never used to measure a profile."""


def demo_context(tokenizer: Any, tokens: int, seed: int) -> Prompt:
    """A context of exactly `tokens` token ids out of the DEMO passages, the question last. See `context`."""
    return context(DEMO, tokenizer, tokens, seed)


def profile_context(tokenizer: Any, tokens: int, seed: int) -> Prompt:
    """A context of exactly `tokens` token ids out of the PROFILE passages, the question last. See `context`."""
    return context(PROFILE, tokenizer, tokens, seed)


def context(passages: Sequence[Passage], tokenizer: Any, tokens: int, seed: int) -> Prompt:
    """Passages in an order given by `seed`, then a question, cut to `tokens` ids in front.

    The cut is at the front because a context may well begin in mid-sentence, but must not end in one. The passage that
    answers lies wholly inside if there is room for it (256 tokens with SmolLM2's tokenizer). A tokenizer with a chat
    template has all of it put into one user turn, the model's turn open. Beyond about 2,400 tokens the passages repeat.
    `tokenizer` has `encode(text, add_special_tokens=...)`. Raises ValueError if the question alone is longer.
    """
    rng = random.Random(seed)
    order = rng.sample(passages, len(passages))
    asked = order[-rng.randint(1, min(3, len(order)))]  # near the end: the front is what is cut off

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    opening, closing = turn(tokenizer)
    head = encode(opening)
    pieces = [encode(f"{passage.title}\n{passage.text}\n\n") for passage in order]
    tail = encode(f"{asked.question} Explain in detail.{closing}")
    room = tokens - len(head) - len(tail)
    at = order.index(asked)
    if room < 1:
        raise ValueError(f"a context of {tokens} tokens has no room for text beside its question, {len(tail)} tokens")
    while len(pieces) > at + 1 and sum(map(len, pieces[at:])) > room:
        pieces.pop()
    body = [token for piece in pieces for token in piece]
    body *= -(-room // len(body))
    return Prompt((*head, *body[-room:], *tail), asked.question, asked.answer)


def turn(tokenizer: Any) -> tuple[str, str]:
    """What stands before and after the text of a user's turn, and opens the model's."""
    if not getattr(tokenizer, "chat_template", None):
        return "", "\n"
    mark = "\0"
    message = [{"role": "user", "content": mark}]
    opening, _, closing = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True).partition(
        mark
    )
    return opening, closing
