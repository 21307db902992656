"""Text to calibrate on: varied in subject, register, language and form, written for this purpose."""

from __future__ import annotations

TEXTS = (
    """The harbour wakes before the town does. By five the first boats are already back, and men in oilskins pass
crates of mackerel up the weed-slick steps while gulls argue overhead. Nobody hurries, yet everything is gone within the
hour: sold, iced, loaded, and on the road to the city. Ask Marta, who has run the auction for thirty-one years, and she
will tell you that the price of fish is decided by the weather three days ago and by a football match tonight.""",
    """Question: A train leaves the station at 9:40 and travels 210 kilometres at an average speed of 84 km/h. When
does it arrive? Answer: The journey takes 210 / 84 = 2.5 hours, which is two hours and thirty minutes. Adding this to
9:40 gives 12:10. The train arrives at ten past twelve. Check: 84 * 2.5 = 210, so the result is consistent.""",
    """def merge(left, right):
    \"\"\"Merge two sorted lists into one sorted list.\"\"\"
    result, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            result.append(left[i]); i += 1
        else:
            result.append(right[j]); j += 1
    return result + left[i:] + right[j:]
""",
    """Dear Ms Okafor, thank you for your message of 3 March about order #48213. We are sorry that one of the two
lamps arrived with a cracked shade. A replacement left our warehouse this morning and should reach you by Friday; you do
not need to return the damaged part. If you would rather have a refund of EUR 37.50, simply reply to this email.""",
    """Photosynthesis takes place in two stages. In the light-dependent reactions, chlorophyll absorbs photons and the
energy splits water into oxygen, protons and electrons; ATP and NADPH are formed along the way. In the Calvin cycle these
carry the energy that fixes carbon dioxide into three-carbon sugars. About half of the world's photosynthesis happens in
the ocean, most of it in plankton too small to see.""",
    """{"id": 7, "name": "Lagos office", "open": true, "rooms": [{"floor": 2, "seats": 14}, {"floor": 3, "seats": 8}],
"contact": {"email": "front.desk@example.org", "phone": null}, "rating": 4.6}
name,quantity,unit_price
"bolt, M6",250,0.08
washer,1000,0.015""",
    """In 1854 a physician named John Snow drew a map. Cholera was killing hundreds in Soho, and the accepted view was
that it spread through foul air. Snow marked each death with a bar and saw that the bars crowded around one water pump in
Broad Street. He persuaded the parish to take off its handle. The epidemic was already fading, but the map outlived it.""",
    """- Preheat the oven to 190 degrees and grease a round tin.
- Whisk 3 eggs with 150 g of sugar until pale and thick, about four minutes.
- Fold in 120 g of flour, a pinch of salt and the zest of one lemon; do not stir the air out.
- Bake for 25 minutes. It is done when a skewer comes out clean and the top springs back.""",
    """"You never said it was a wolf," whispered Anselm. "You never asked," said the old woman, and she went on
shelling beans. Outside, something large sat down in the snow and sighed. He thought of the long way home, of the
lantern with its thumb of oil, of his mother who would still be awake. Then he did the only sensible thing and took a
second bowl from the shelf.""",
    """Die Sitzung beginnt um halb neun im großen Saal; bitte bringen Sie die Unterlagen vom letzten Monat mit. Le
marché ouvre tous les jours sauf le lundi, et l'on y trouve du miel, des figues et du fromage de brebis. El tren de las
siete llegó con retraso porque había nevado en el puerto. Il gatto dorme sul davanzale mentre fuori piove.""",
    """The parties agree that any dispute arising out of or in connection with this Agreement, including any question
regarding its existence, validity or termination, shall be referred to and finally resolved by arbitration. The seat of
arbitration shall be Geneva. Nothing in this clause prevents either party from seeking urgent interim relief before a
competent court.""",
    """Review: bought these headphones for the commute, two months in. Sound is great for the money!! Battery lasts
forever, maybe 28-30 hrs. BUT the ear pads get sweaty & the app keeps asking me to log in... 4/5, would buy again.
Pros: light, comfy, loud. Cons: case feels cheap, no aux cable. Sentiment: mostly positive.""",
    """Let f be continuous on the closed interval [a, b] and differentiable inside it. Then there is a point c with
f(b) - f(a) = f'(c)(b - a). To see why, subtract from f the straight line through the end points; the difference vanishes
at both ends, so by Rolle's theorem its derivative is zero somewhere between them, and that is the claim.""",
    """SELECT customer_id, SUM(total) AS spent FROM orders WHERE placed_at >= '2024-01-01' GROUP BY customer_id HAVING
SUM(total) > 500 ORDER BY spent DESC LIMIT 10;
$ grep -rn "TODO" src/ | wc -l
<ul class="menu"><li><a href="/about">About us</a></li><li><a href="/jobs">Jobs</a></li></ul>""",
    """Economists disagree about why wages and productivity parted. One camp points to technology that favours the
skilled; another to the decline of unions; a third to measurement, since benefits and prices are counted differently on
the two sides. The evidence differs from country to country, which suggests that no single cause will do. What is clear is
that the gap opened slowly, over decades, and that it did not close in good years.""",
    """User: I feel tired all the time, even when I sleep eight hours. What could be the reason? Assistant: There are
many possible causes. Common ones are poor sleep quality, stress, low iron, an underactive thyroid, or simply too little
movement during the day. If it has lasted for more than a few weeks, a doctor can check the most likely ones with a
blood test. Until then, a regular bedtime and some daylight in the morning often help.""",
    """Tashkent, Yerevan, Reykjavík, Wellington, Montevideo; oxygen, tungsten, praseodymium; adagio, pizzicato, fugue.
Height 8,849 m. Temperature -40 °C. Latitude 51.4779° N. Phone +44 20 7946 0958. ISBN 978-3-16-148410-0. 17 x 23 = 391.
The quick brown fox jumps over the lazy dog while five boxing wizards jump quickly.""",
    """The bridge engineer's first question is not how much it must carry but how it will move. Steel grows by twelve
millionths of its length for every degree, so a span of three hundred metres breathes by a hand's width between winter and
summer. Bearings, joints and pendulums exist to let it. A structure that cannot move does not stand still; it breaks.""",
    """Minutes of the allotment society. Present: nine members. The water butt by the north gate leaks and will be
replaced (Dilip to ask for quotes). The plot at the corner is free again; the waiting list has twenty-two names. Bees: the
second hive came through the winter. It was agreed, with one vote against, that bonfires end at dusk.""",
    """At the edge of the solar system the wind from our star meets the thin gas between the stars and stops. The two
Voyager probes have crossed that border, one in 2012 and the other in 2018, and both still answer when called, with a
transmitter weaker than a refrigerator bulb. Their signal takes most of a day to arrive.""",
)
